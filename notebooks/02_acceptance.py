# %% [markdown]
# # Which drafts stand, and when drafting pays
#
# A draft is a guess drawn from a small law **q** (the MTP layer's) about a token that the target will draw from its
# own law **p**. How often it stands depends on p, q and on the rule. This notebook takes both laws from the bundled
# model, on text that it wrote itself, computes what three rules keep exactly, draws tens of thousands of times to
# see that each leaves the target's law as it is, and then asks when all this is worth a longer step.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from mtp_jax import LLM, SamplingParams
from mtp_jax.acceptance.judging import judge_tokens
from mtp_jax.bench.acceptance import argmax_share, coupled_share, drawn_share
from mtp_jax.bench.tables import table
from mtp_jax.checkpoints import load_model
from mtp_jax.core.types import Drafts
from mtp_jax.policies.schedule import ScheduledDraftLen
from mtp_jax.train.loss import predict

plt.style.use("style.mplstyle")
SHARES = {"argmax draft": argmax_share, "coupled draft": coupled_share, "drawn draft, rejection": drawn_share}


def claim(sentence, holds):
    assert holds, sentence
    print("holds:", sentence)


model = load_model("tiny-mtp")
llm = LLM(
    "tiny-mtp",
    speculative_config={"method": "mtp", "num_speculative_tokens": 3},
    max_num_seqs=1,
    max_model_len=256,
    prefill_chunk=16,
)
step_costs = llm.engine.launcher.measure_step_costs(rounds=40)  # for the end; before the first request

# %% [markdown]
# ## Text, and both laws at every place of it
#
# Six prompts, each written on at temperature 0.8. One teacher-forced pass over each text gives the target's logits
# of every token, and those of the MTP layer for the same token, one step earlier.

# %%
PROMPTS = [
    "The history of",
    "def read_config(path):\n",
    "import json\n",
    "In the beginning",
    "class Stack:\n",
    "A tree is",
]
params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=96, ignore_eos=True) for seed in range(len(PROMPTS))]
outputs = llm.generate(PROMPTS, params, use_tqdm=False)
texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]

longest = max(map(len, texts))
tokens_BT = np.zeros((len(texts), longest + 2), np.int32)
for row, text in zip(tokens_BT, texts, strict=True):
    row[: len(text)] = text


@jax.jit
def laws(weights, tokens_BT):
    predictions = predict(model.family, weights, tokens_BT, 1)
    return predictions.target_BSV, predictions.drafts[0]


target_BSV, draft_BSV = (np.asarray(logits, np.float64) for logits in laws(model.weights, jnp.asarray(tokens_BT)))
places = [
    (target_BSV[index, position], draft_BSV[index, position - 1])
    for index, (text, output) in enumerate(zip(texts, outputs, strict=True))
    for position in range(len(output.prompt_token_ids), len(text) - 1)
]


def law(logits_V, temperature):
    weights_V = np.exp((logits_V - logits_V.max()) / temperature)
    return weights_V / weights_V.sum()


print(f"{len(places)} places; a vocabulary of {model.family.vocab_size:,} tokens")

# %% [markdown]
# ## One place, drawn
#
# A place where the target is not sure, and the two laws differ, but not wildly. The area under both bars is what
# rejection sampling keeps: the sum of min(p, q).

# %%
TEMPERATURE = 0.8
spread = [(p, q) for p, q in places if law(p, TEMPERATURE).max() < 0.5]
kept = [drawn_share(law(p, TEMPERATURE), law(q, TEMPERATURE)) for p, q in spread]
place = int(np.argmin(np.abs(np.array(kept) - 0.6)))
p_V, q_V = (law(logits, TEMPERATURE) for logits in spread[place])
order = np.argsort(-np.maximum(p_V, q_V))[:14]

fig, ax = plt.subplots(figsize=(9, 3.4))
x = np.arange(len(order))
ax.bar(x - 0.2, p_V[order], 0.4, label="p: target")
ax.bar(x + 0.2, q_V[order], 0.4, label="q: MTP layer")
ax.bar(x, np.minimum(p_V, q_V)[order], 0.8, color="black", alpha=0.18, label="min(p, q)")
names = [repr(llm.tokenizer.decode([token]))[1:-1].replace(" ", "␣") for token in order]
ax.set_xticks(x, names, rotation=45, ha="right")
ax.set(ylabel="probability", title=f"the {len(order)} likeliest tokens at one place, temperature {TEMPERATURE:g}")
ax.legend()
plt.show()

exact = {name: share(p_V, q_V) for name, share in SHARES.items()}
print(table([["stands with probability", "exactly"], *([name, f"{value:.3f}"] for name, value in exact.items())]))

# %% [markdown]
# ## Drawn 40,000 times
#
# - **Argmax draft**: the drafter's likeliest token; it stands if the target draws the same.
# - **Coupled draft**: target and drafter add the *same* Gumbel noise to their log-probabilities and take the argmax. It
#   stands if the two are equal. The token emitted is the target's in any case.
# - **Drawn draft, rejection**: x drawn from q stands if a coin is below p(x) / q(x), else the token follows
#   max(p - q, 0): `judge_tokens`, the engine's own function.
#
# Each of them must leave the emitted tokens to p. Laws are cut to the 64 likeliest tokens and normalised again, so
# that every token is drawn often enough to count.

# %%
DRAWS, CUT = 40_000, 64
few = np.argsort(-(p_V + q_V))[:CUT]
p, q = p_V[few] / p_V[few].sum(), q_V[few] / q_V[few].sum()
rng = np.random.default_rng(0)
noise = rng.gumbel(size=(DRAWS, CUT))
plain = np.argmax(np.log(p) + noise, axis=1)
coupled = np.argmax(np.log(q) + noise, axis=1)

drawn = rng.choice(CUT, size=DRAWS, p=q)
rows = {"p": np.stack([p, p]), "q": q[None]}
judged = judge_tokens(
    Drafts(jnp.asarray(drawn[:, None], jnp.int32), jnp.broadcast_to(rows["q"].astype(np.float32), (DRAWS, 1, CUT))),
    jnp.broadcast_to(rows["p"].astype(np.float32), (DRAWS, 2, CUT)),
    jnp.ones(DRAWS, jnp.int32),
    jnp.asarray(rng.uniform(size=(DRAWS, 1)), jnp.float32),
)
stands = np.asarray(judged.num_accepted) == 1
instead = np.argmax(np.log(np.maximum(np.asarray(judged.weights_BV), 1e-30)) + rng.gumbel(size=(DRAWS, CUT)), axis=1)
emitted = {"match (argmax or coupled)": plain, "rejection": np.where(stands, drawn, instead)}

measured = {"argmax draft": plain == q.argmax(), "coupled draft": plain == coupled, "drawn draft, rejection": stands}
head = ["", "exactly", f"of {DRAWS:,} draws", "standard deviations"]
rows, worst = [head], 0.0
for name, hits in measured.items():
    share = SHARES[name](p, q)
    sigma = (hits.mean() - share) / np.sqrt(share * (1 - share) / DRAWS)
    worst = max(worst, abs(sigma))
    rows.append([name, f"{share:.4f}", f"{hits.mean():.4f}", f"{sigma:+.1f}"])
print(table(rows))

fig, ax = plt.subplots(figsize=(9, 3.2))
top = np.argsort(-p)[:14]
x = np.arange(len(top))
ax.bar(x, p[top], 0.85, color="#d9d9d9", label="p, exactly")
for shift, (name, tokens) in zip((-0.15, 0.15), emitted.items(), strict=True):
    counts = np.bincount(tokens, minlength=CUT)[top]
    ax.errorbar(x + shift, counts / DRAWS, 3 * np.sqrt(counts) / DRAWS, fmt="o", markersize=4, label=f"emitted, {name}")
ax.set_xticks(x, [repr(llm.tokenizer.decode([few[t]]))[1:-1].replace(" ", "␣") for t in top], rotation=45, ha="right")
ax.set(ylabel="share of emitted tokens", title="both rules emit the target's law (bars: 3 standard deviations)")
ax.legend()
plt.show()

chi2 = {}
cells = np.where(p * DRAWS >= 20, np.arange(CUT), CUT)  # rare tokens are counted together
for name, tokens in emitted.items():
    expected = np.bincount(cells, p * DRAWS, minlength=CUT + 1)
    observed = np.bincount(cells[tokens], minlength=CUT + 1)
    counted = expected >= 5
    off = (observed - expected)[counted] ** 2 / expected[counted]
    chi2[name] = float(off.sum()), int(counted.sum())
print(table([["", "chi-square", "of so many cells"], *([name, f"{c:.1f}", str(n)] for name, (c, n) in chi2.items())]))

# %% [markdown]
# ## Over the whole text, by temperature
#
# The mean over all places of what each rule keeps of first drafts. At temperature 0 the three are one. Above it an
# argmax draft loses fast: the target draws something else. A coupled draft keeps near to what rejection keeps, and
# the text stays, token for token, that of plain decoding.

# %%
TEMPERATURES = np.array([0.1, 0.25, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4])
some = places[::4]
means = {name: [] for name in SHARES}
for temperature in TEMPERATURES:
    pairs = [(law(p, temperature), law(q, temperature)) for p, q in some]
    for name, share in SHARES.items():
        means[name].append(np.mean([share(p, q) for p, q in pairs]))
fig, ax = plt.subplots()
for name, values in means.items():
    ax.plot(TEMPERATURES, values, "o-", label=name)
ax.set(xlabel="temperature", ylabel="share of first drafts kept", ylim=(0, 1))
ax.set(title=f"exact, mean over {len(some)} places of the model's own text")
ax.legend()
plt.show()

# %% [markdown]
# ## Expected length
#
# Draft j counts only if all before it stood. With a_j the share of j-th drafts kept *given* that, a step with K
# drafts emits 1 + a_1 + a_1 a_2 + ... tokens on average. The a_j are counted once, on texts written with three
# drafts a step; from them follows what one and two drafts a step must bring. Then the engine is told to make one,
# and two.


# %%
def written_with(length):
    llm.engine.scheduler.policy = ScheduledDraftLen(((1, length),))
    records = [record for prompt, one in zip(PROMPTS, params, strict=True) for record in llm.trace(prompt, one)]
    return [record for record in records if len(record.drafts) == length]


by_length = {length: written_with(length) for length in (3, 2, 1)}
reached = np.array([sum(record.num_accepted >= j for record in by_length[3]) for j in range(4)])
rates = reached[1:] / reached[:-1]
rows, seen, expected = [["drafts a step", "steps", "a_K", "expected tokens a step", "counted"]], {}, {}
for length in (1, 2, 3):
    expected[length] = 1 + sum(np.prod(rates[: j + 1]) for j in range(length))
    seen[length] = 1 + np.mean([record.num_accepted for record in by_length[length]])
    figures = [f"{rates[length - 1]:.2f}", f"{expected[length]:.2f}", f"{seen[length]:.2f}"]
    rows.append([str(length), str(len(by_length[length])), *figures])
print(table(rows))

# %% [markdown]
# ## When K pays
#
# A step with K drafts costs more than one without. What it costs was measured at the start, on the machine that runs
# this notebook, as `policy="goodput"` does. It pays if tokens a step grow faster than the cost: below, tokens a
# second relative to K = 0, as a function of one acceptance rate a for every position.

# %%
cost_ms = [1000 * step_costs[1, length] for length in range(4)]
a = np.linspace(0, 1, 101)
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
left.bar(range(4), cost_ms, color="#9cc3e4")
left.set(xlabel="drafts a step, K", ylabel="milliseconds a step", xticks=range(4), title="measured at start, one slot")
gain = {}
for length in range(1, 4):
    tokens = sum(a**j for j in range(length + 1))
    gain[length] = tokens * cost_ms[0] / cost_ms[length]
    right.plot(a, gain[length], label=f"K = {length}")
right.axhline(1, color="black", linewidth=1)
right.plot(rates.mean(), 1, "k^", markersize=8, label="this text's mean rate")
right.set(xlabel="share of drafts kept, a", ylabel="tokens/s over K = 0", title="above the line drafting pays")
right.legend()
plt.show()

rows = [["K", "cost over K = 0", "pays from a ="]]
for length, values in gain.items():
    pays = f"{a[np.argmax(values > 1)]:.2f}" if (values > 1).any() else "never"
    rows.append([str(length), f"{cost_ms[length] / cost_ms[0]:.2f}", pays])
print(table(rows))

# %% [markdown]
# ## What holds
#
# Times differ from machine to machine; what follows does not.

# %%
claim("draws agree with the exact shares within 4 standard deviations", worst < 4)
claim("both rules emit the target's law (chi-square)", all(c < n + 5 * np.sqrt(2 * n) for c, n in chi2.values()))
claim(
    "rejection keeps at least what coupling keeps, and coupling half of it or more",
    all(c <= r + 1e-9 and c >= r / (2 - r) - 1e-9 for c, r in zip(*list(means.values())[1:], strict=True)),
)
claim(
    "coupling beats argmax drafts from temperature 0.6 on",
    all(np.array(means["coupled draft"])[3:] > np.array(means["argmax draft"])[3:]),
)
claim(
    "one and two drafts bring what three foretold, to a tenth",
    all(abs(seen[k] / expected[k] - 1) < 0.1 for k in (1, 2)),
)
