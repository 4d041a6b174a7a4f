# %% [markdown]
# # One decode step, shape by shape
#
# An engine that drafts does four things in each step, in one compiled call: **draft** a few tokens, **verify** them
# with the model, **accept** the longest prefix that is right, **commit** what was gained. Here a real prompt goes
# through the engine, one of its steps is done again by hand, verb by verb, and every array is looked at. The words
# are those of `mtp_jax/core/types.py`.

# %%
from dataclasses import fields

import jax
import matplotlib.pyplot as plt
import numpy as np

from mtp_jax import LLM, SamplingParams
from mtp_jax.bench.tables import table
from mtp_jax.core.shapes import StepShape
from mtp_jax.core.types import StepInputs
from mtp_jax.step.commit import count_emitted
from mtp_jax.step.decode import verify, view_slots
from mtp_jax.testing.launches import recorded_launches

plt.style.use("style.mplstyle")


def claim(sentence, holds):
    assert holds, sentence
    print("holds:", sentence)


llm = LLM(
    "tiny-mtp",
    speculative_config={"method": "mtp", "num_speculative_tokens": 3},
    max_num_seqs=1,
    max_model_len=256,
    prefill_chunk=16,
)
engine = llm.engine
print(f"compiled: {len(engine.grid.all_steps())} decode programs and {len(engine.grid.all_prefills())} for prefill")

# %% [markdown]
# ## A prompt, step by step
#
# `LLM.trace` yields a record for each decode step. `recorded_launches` keeps what each launch was given, so that one
# of them can be done again below.

# %%
PROMPT = "def read_config(path):\n"
with recorded_launches(engine) as launches:
    records = list(llm.trace(PROMPT, SamplingParams(temperature=0.8, seed=3, max_tokens=40)))


def shown(tokens):
    return " ".join(repr(llm.tokenizer.decode([token]))[1:-1].replace(" ", "␣") for token in tokens)


rows = [["step", "c before", "K", "cap", "drafts", "the target's own tokens", "accepted", "c after"]]
for number, record in enumerate(records):
    drafts, target = shown(record.drafts), shown(record.target_tokens)
    before, after = record.committed_len_before, record.committed_len_after
    rows.append(
        [
            str(x)
            for x in (number, before, record.draft_len, record.draft_cap, drafts, target, record.num_accepted, after)
        ]
    )
print(table(rows))

# %% [markdown]
# Every emitted token is the target's own; a draft only decides whether it comes now or a step later. "Cap" is what
# the host allows a slot; the device knows its lengths better: with r tokens to go, at most r - 1 drafts can be of
# use.
#
# The same as a picture: the text, and how each token of it came.

# %%
COLORS = {"accepted draft": "#b7dfc3", "bonus token": "#bcd6ee", "refused draft": "#f3c9b3"}
fig, ax = plt.subplots(figsize=(8.6, 0.34 * len(records) + 0.8))
for number, record in enumerate(records):
    for place, token in enumerate(record.emitted):
        kind = "accepted draft" if place < record.num_accepted else "bonus token"
        ax.barh(number, 1, left=place, color=COLORS[kind], edgecolor="white")
        ax.text(place + 0.5, number, shown([token]), ha="center", va="center", fontsize=8)
    for place in range(len(record.emitted), len(record.drafts) + 1):
        ax.barh(number, 1, left=place + 0.6, color=COLORS["refused draft"], edgecolor="white")
        ax.text(place + 1.1, number, shown(record.drafts[place - 1 : place]), ha="center", va="center", fontsize=8)
for kind in ("accepted draft", "bonus token", "refused draft"):
    ax.barh(0, 0, color=COLORS[kind], label=kind)
ax.set(
    xlabel="tokens of the step (refused drafts set apart)",
    ylabel="decode step",
    xlim=(0, 4.7),
    yticks=range(len(records)),
)
ax.invert_yaxis()
ax.grid(visible=False)
ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

num_tokens = sum(len(record.emitted) for record in records)
print(f"{num_tokens} tokens in {len(records)} steps: {num_tokens / len(records):.2f} tokens a step")

# %% [markdown]
# ## One of these steps again, by hand
#
# A step in which some drafts stood and some fell. This is `decode_step` of `mtp_jax/step/decode.py` with its middle
# laid open: `view_slots` joins the one upload of the host (`packed_BX`: who takes part, caps, limits, sampling, page
# table) with what only the device knows (lengths, pending token, history); then come the four verbs.

# %%
number = next(i for i, record in enumerate(records) if 0 < record.num_accepted < len(record.drafts))
record = records[number]
decodes = [launch for launch in launches if isinstance(launch.shape, StepShape)]
launch, program = decodes[number], engine.program


@jax.jit
def by_hand(weights, state, packed_BX):
    inputs = StepInputs.unpack(packed_BX, num_stop_ids=program.num_stop_ids)
    slots = view_slots(state, inputs, launch.shape, program.family.vocab_size)
    model = program.bind(weights)
    drafts, *_ = program.proposer.propose(model, state.carry, state.draft_kv, slots, draft_len=launch.shape.draft_len)
    verified, _ = verify(model, state.kv, slots, drafts)
    accepted = program.rule.accept(drafts, verified.logits_BWV, slots, program.parallel)
    num_emitted, _ = count_emitted(accepted, slots)
    return slots, drafts, verified, accepted, num_emitted


slots, drafts, verified, accepted, num_emitted = by_hand(launch.weights, launch.state, launch.packed_BX)

print(f"step {number}: {launch.shape}\n")
rows = [["", "shape", "type", "value"]]


def look(name, array):
    value = np.asarray(array)
    rows.append([name, str(value.shape), str(value.dtype), str(value.tolist()) if value.size <= 4 else ""])


look("in: packed_BX, the upload", launch.packed_BX)
for name in ("committed_len", "pending_token", "draft_cap", "limit", "page_table_BP", "history_BS", "noise_BWV"):
    look(f"slots.{name}", getattr(slots, name))
look("draft: drafts.tokens_BK", drafts.tokens_BK)
look("verify: features_BWJ", verified.features_BWJ)
look("verify: logits_BWV", verified.logits_BWV)
look("accept: target_tokens_BW", accepted.target_tokens_BW)
look("accept: num_accepted", accepted.num_accepted)
look("commit: num_emitted", num_emitted)
print(table(rows))

# %% [markdown]
# B = 1 slot, K = 3 drafts, W = K + 1 = 4 rows to verify, V = 4,096 tokens. The state that stays on the device, and
# is donated to each launch, is larger than all of these:

# %%
rows = [["state", "arrays", "shape of the first", "KiB"]]
for field in fields(launch.state):
    leaves = jax.tree.leaves(getattr(launch.state, field.name))
    size = sum(leaf.nbytes for leaf in leaves) / 1024
    rows.append([field.name, str(len(leaves)), str(leaves[0].shape) if leaves else "", f"{size:,.1f}"])
print(table(rows))

# %% [markdown]
# ## What the target said
#
# Row 0 was fed the pending token, row w the w-th draft. Each bar is the target's law at temperature 0.8 for the
# token that follows. The token drawn (bold frame) is the argmax of logits plus the noise of its position: not always
# the likeliest, and yet the draft, drawn with the same noise from the drafter's law, often is the same.

# %%
SHOWN = 6
fed = [int(slots.pending_token[0]), *np.asarray(drafts.tokens_BK[0]).tolist()]
law_WV = np.asarray(jax.nn.softmax(verified.logits_BWV[0] / 0.8, axis=-1))
target = np.asarray(accepted.target_tokens_BW[0]).tolist()
fig, axes = plt.subplots(1, len(fed), figsize=(10, 2.9), sharex=True)
for row, ax in enumerate(axes):
    tokens = np.argsort(-law_WV[row])[:SHOWN].tolist()
    if target[row] not in tokens:
        tokens[-1] = target[row]
    draft = fed[row + 1] if row + 1 < len(fed) else None
    for place, token in enumerate(tokens):
        color = COLORS["accepted draft"] if token == draft == target[row] else COLORS["bonus token"]
        color = COLORS["refused draft"] if token == draft != target[row] else color
        edge, width = ("black", 1.6) if token == target[row] else ("white", 1)
        ax.barh(place, law_WV[row, token], color=color, edgecolor=edge, linewidth=width)
    ax.set(yticks=range(SHOWN), yticklabels=[shown([token]) for token in tokens], xlim=(0, 1))
    ax.set(title=f"row {row}, after {shown(fed[row : row + 1])!s}", xlabel="probability")
    ax.invert_yaxis()
    ax.grid(visible=False)
plt.show()
print("green: a draft that is the target's token; orange: a draft that is not")

# %% [markdown]
# ## What became of the pages
#
# Verification wrote keys and values of the pending token and of the drafts at positions c ... c + 3. Commit moves
# `committed_len` behind the accepted ones. What lies beyond is nobody's: no query sees it before it is written
# again. That is all there is of rolling back.

# %%
before, after = record.committed_len_before, record.committed_len_after
page_size = engine.config.cache.page_size
last = before + len(record.drafts)
first_shown, end = before - 5, page_size * (last // page_size + 1) + 2
kinds = [
    ("final before the step", range(first_shown, before), "#9cc3e4"),
    ("written, and final now", range(before, after), COLORS["accepted draft"]),
    ("written, and nobody's", range(after, last + 1), COLORS["refused draft"]),
    ("not written yet", range(last + 1, end), "#eeeeee"),
]
fig, ax = plt.subplots(figsize=(9, 1.9))
text = np.asarray(launch.state.history_BS[0]).tolist()[: before + 1] + list(record.drafts)
for label, positions, color in kinds:
    ax.bar([*positions], 1, width=1, color=color, edgecolor="white", label=label)
for position in range(first_shown, last + 1):
    ax.text(position, 0.5, shown([text[position]]), ha="center", va="center", fontsize=8, rotation=90)
for edge in range(first_shown, end):
    if edge % page_size == 0:
        ax.axvline(edge - 0.5, color="black", linewidth=1.5)
ax.set(xlabel=f"position (a black line begins a page of {page_size})", yticks=[], ylim=(0, 1))
ax.set(xlim=(first_shown - 0.5, end - 0.5), xticks=range(first_shown, end))
ax.grid(visible=False)
ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=8)
plt.show()

# %% [markdown]
# ## What holds
#
# The four verbs by hand are the engine's own step, and what the engine wrote is what plain decoding writes: the same
# prompt, parameters and seed through an engine that never drafts.

# %%
n = int(num_emitted[0])
claim("drafts by hand are those that the engine made", tuple(drafts.tokens_BK[0].tolist()) == record.drafts)
claim("so are the target's tokens", tuple(target) == record.target_tokens)
claim("the step emits the accepted drafts and one token more", n == record.num_accepted + 1 == len(record.emitted))
claim("committed_len moves by what was emitted", after == before + n)
claim("accepted drafts are the target's tokens", record.drafts[: n - 1] == record.target_tokens[: n - 1])

plain = LLM("tiny-mtp", speculative_config=None, max_num_seqs=1, max_model_len=256, prefill_chunk=16)
[output] = plain.generate(PROMPT, SamplingParams(temperature=0.8, seed=3, max_tokens=40))
tokens = [token for record in records for token in record.emitted]
claim("plain decoding writes the same tokens", list(output.outputs[0].token_ids)[1:] == tokens)
print(f"\n{output.outputs[0].text}")
