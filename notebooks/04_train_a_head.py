# %% [markdown]
# # Train an MTP layer, and watch acceptance rise
#
# The bundled model's own MTP layer is put aside, a new one with random weights takes its place, and is trained for
# about half a minute on the target as it is. The text is what everybody has at hand: Python's standard library. What
# is measured is what matters to decoding: how often the target would accept the layer's drafts, on files that were
# not trained on.

# %%
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from mtp_jax import LLM, SamplingParams
from mtp_jax.bench.tables import table
from mtp_jax.checkpoints import load_model
from mtp_jax.text import tokenizer_of
from mtp_jax.train.evaluate import evaluate_heads
from mtp_jax.train.loss import Objective
from mtp_jax.train.state import MTP_ROOT
from mtp_jax.train.texts import tokens_in
from mtp_jax.train.train import TrainConfig, Trainer

plt.style.use("style.mplstyle")


def claim(sentence, holds):
    assert holds, sentence
    print("holds:", sentence)


model = load_model("tiny-mtp")
family, tokenizer = model.family, tokenizer_of(model)
library = Path(sysconfig.get_path("stdlib"))
TRAINED_ON = ("argparse", "ast", "calendar", "configparser", "contextlib", "csv", "dataclasses", "datetime", "difflib")
TRAINED_ON += ("enum", "fractions", "ftplib", "functools", "gettext", "heapq", "inspect", "ipaddress", "mailbox")
TRAINED_ON += ("optparse", "pathlib", "pdb", "pickle", "platform", "plistlib", "pprint", "random", "shutil", "smtplib")
HELD_OUT = ("statistics", "tarfile", "textwrap", "zipfile")


def tokens_of(modules):
    files = [file for name in modules if (file := library / f"{name}.py").exists()]
    return np.concatenate([tokens_in(file, family, tokenizer) for file in files])


train_tokens, held_out = tokens_of(TRAINED_ON), tokens_of(HELD_OUT)[:8_000]
print(f"{len(train_tokens):,} tokens to train on, {len(held_out):,} held out")

# %% [markdown]
# ## The new layer
#
# Weights of MTP layers stand under one entry of the weights. Everything else, the embedding and the head that the
# layer shares with the target included, stays as it is.

# %%
new_weights = family.init_weights(jax.random.key(0), jnp.float32)
weights = {**model.weights, MTP_ROOT: new_weights[MTP_ROOT]}


def num_parameters(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


print(f"{num_parameters(weights[MTP_ROOT]):,} parameters to train, of {num_parameters(weights):,}")

# %% [markdown]
# ## Training
#
# The loss is the distance between the target's law and the layer's (`distillation=1`), not between the text and the
# layer's: what acceptance asks for is agreement with the target, right or wrong. Three passes, each on the hidden
# state that the one before gave, as in decoding with K = 3.

# %%
STEPS, EVERY = 120, 20
config = TrainConfig(
    mode="heads",
    steps=STEPS,
    batch_size=8,
    window=64,
    peak_rate=4e-3,
    warmup_steps=10,
    objective=Objective(depths=3, mtp_weight=1.0, distillation=1.0),
    compute_dtype="float32",
)


def evaluated(weights):
    return evaluate_heads(family, weights, held_out, depths=3, window=128, batch_size=8)


reports, losses = {}, []
with TemporaryDirectory() as folder:
    trainer = Trainer(family, config, train_tokens, Path(folder))
    state = trainer.fresh(weights)
    for step in range(STEPS):
        if step % EVERY == 0:
            reports[step] = evaluated(state.weights)
        state, metrics = trainer.advance(state, step)
        losses.append(metrics["loss"])
reports[STEPS] = evaluated(state.weights)
losses = np.asarray(jax.device_get(losses))
trained = jax.tree.map(jnp.asarray, jax.device_get(state.weights))  # as loaded weights lie: programs are found again
bundled = evaluated(model.weights)

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
left.plot(range(STEPS), losses)
left.set(
    xlabel="training step", ylabel="KL(target, MTP layer), nats", title="loss on the texts trained on", ylim=(0, None)
)
for depth in range(3):
    values = [report.cumulative[depth] for report in reports.values()]
    right.plot([*reports], values, "o-", color=f"C{depth}", label=f"draft {depth + 1} and those before")
    right.axhline(bundled.cumulative[depth], color=f"C{depth}", linestyle=":", linewidth=1)
right.plot([*reports], [report.control[0] for report in reports.values()], "k--", linewidth=1, label="control")
right.set(
    xlabel="training step",
    ylabel="share of steps accepted",
    ylim=(0, 1),
    title="held-out files (dotted: the bundled layer)",
)
right.legend()
plt.show()

rows = [["step", "draft 1", "1 and 2", "1 to 3", "tokens a step", "control", "chance"]]
for step, report in [*reports.items(), ("bundled", bundled)]:
    shares = [f"{share:.3f}" for share in report.cumulative]
    control = [f"{report.control[0]:.3f}", f"{report.chance[0]:.3f}"]
    rows.append([str(step), *shares, f"{report.mean_acceptance_length:.2f}", *control])
print(table(rows))

# %% [markdown]
# The control compares each draft with the target's token 37 positions further on. It must stay near chance; if it
# rose with the curve, the measurement would be at fault, not the layer good.
#
# ## In the engine
#
# The same layer, before and after, in a decoding engine. Prompts are beginnings of lines from the held-out files.

# %%
PROMPTS = ["def mean(data):\n", "class ZipInfo:\n", "    def extract(self, ", "def wrap(text, width="]
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def decode(weights):
    llm = LLM.from_weights(
        family,
        weights,
        tokenizer=tokenizer,
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
        max_num_seqs=1,
        max_model_len=256,
        prefill_chunk=16,
    )
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], llm.get_metrics()["mean_acceptance_length"]


rows = [["MTP layer", "tokens a step"]]
texts = {}
for name, candidate in {"new, random": weights, "trained here": trained}.items():
    texts[name], length = decode(candidate)
    rows.append([name, f"{length:.2f}"])
print(table(rows))

# %% [markdown]
# ## What holds

# %%
first, last = reports[0], reports[STEPS]
claim("a random layer is of no use", first.cumulative[0] < 0.05)
claim("the trained one is accepted at least ten times as often", last.cumulative[0] > 10 * first.cumulative[0] + 0.1)
claim("later drafts are accepted less often than earlier ones", list(last.cumulative) == sorted(last.cumulative)[::-1])
claim("the control stays near chance", abs(last.control[0] - last.chance[0]) < 0.05)
claim("so the engine writes more tokens a step", length > 1.2)
claim("the text is the same with either layer", texts["new, random"] == texts["trained here"])

# %% [markdown]
# From the command line, with snapshots, a log and texts of your own: `mtp-jax train heads`, then `mtp-jax eval-
# heads`. How the bundled layer was trained stands in its card, `checkpoints/tiny-mtp/README.md`.
