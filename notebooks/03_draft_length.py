# %% [markdown]
# # How many drafts: limits, the vote, and what a zero costs
#
# K, the number of drafts of a step, is part of the compiled program, so all slots of a launch share it, on all
# devices. Here eight devices (of the CPU) run a batch in which requests near their end sit beside others that have
# just begun. The model is the toy family of `mtp_jax.testing`: integers, exact, and with MTP layers that are right
# seven times in ten.

# %%
import os

os.environ.setdefault("NPROC", "16")  # XLA's CPU collectives block a thread each

import jax

jax.config.update("jax_num_cpu_devices", 8)

from collections import defaultdict
from itertools import accumulate

import matplotlib.pyplot as plt
import numpy as np

from mtp_jax import SamplingParams
from mtp_jax.bench.tables import table
from mtp_jax.engine.requests import Request
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import restart, toy_engine
from mtp_jax.testing.oracle import plain_decode
from mtp_jax.testing.policies import ScriptedDraftLen
from mtp_jax.testing.toy_family import ToyFamily

plt.style.use("style.mplstyle")
FAMILY, LONGEST, SHARDS, KMAX = ToyFamily(vocab_size=24), 48, 8, 3


def claim(sentence, holds):
    assert holds, sentence
    print("holds:", sentence)


def batch(num_tokens):
    """One request for each device; request i has a prompt of its own and `num_tokens[i]` to write."""
    return [
        Request(str(i), (3 + i, 5, 7), SamplingParams(temperature=0, max_tokens=count), seed=i, wants_trace=True)
        for i, count in enumerate(num_tokens)
    ]


mesh = toy_engine(FAMILY, data=SHARDS, max_num_seqs=SHARDS)
print(f"a mesh of {SHARDS} devices; {len(mesh.grid.all_steps())} decode programs, {mesh.grid.all_steps()}")

# %% [markdown]
# ## A batch that nears its limit
#
# Eight requests, one for each device, with prompts of 3 to 38 tokens; each writes until the longest text allowed, 48
# tokens, is full. So one after another comes near the end. Under `row_cap`, the default, a slot that is near its
# limit gets a smaller cap of its own. Under `group_zero` the whole mesh drafts nothing while any slot could pass the
# limit.

# %%
prompts = [tuple((7 * i + 3 * t) % FAMILY.vocab_size for t in range(3 + 5 * i)) for i in range(SHARDS)]
near_limit = [
    Request(str(i), prompt, SamplingParams(temperature=0, max_tokens=99), seed=i, wants_trace=True)
    for i, prompt in enumerate(prompts)
]


def by_launch(run):
    """{launch: {request: its record}}, decode launches in order."""
    found = defaultdict(dict)
    for request_id, progress in run.finished.items():
        for record in progress.state.records:
            found[record.launch][int(request_id)] = record
    return dict(sorted(found.items()))


runs = {}
for rule in ("row_cap", "group_zero"):
    runs[rule] = run_plan(restart(mesh, near_limit=rule), near_limit)  # checks pages and books after every step

fig, axes = plt.subplots(2, 2, figsize=(10, 5), height_ratios=[3, 1], sharex="col")
for column, (rule, run) in enumerate(runs.items()):
    launches = by_launch(run)
    emitted = np.full((SHARDS, len(launches)), np.nan)
    for step, records in enumerate(launches.values()):
        for request, record in records.items():
            emitted[request, step] = len(record.emitted)
    draft_lens = [next(iter(records.values())).draft_len for records in launches.values()]
    image = axes[0, column].imshow(emitted, aspect="auto", cmap="YlGn", vmin=0, vmax=KMAX + 1)
    axes[0, column].set(title=f"{rule}: {len(launches)} decode launches", ylabel="request", yticks=range(SHARDS))
    axes[0, column].grid(visible=False)
    axes[1, column].step(range(len(launches)), draft_lens, where="mid")
    axes[1, column].set(xlabel="decode launch", ylabel="K", ylim=(-0.2, KMAX + 0.2), yticks=range(KMAX + 1))
fig.colorbar(image, ax=axes[0], label="tokens emitted")
plt.show()

# %% [markdown]
# Both write the same text; that of `group_zero` takes longer. What a zero costs is first of all the tokens that
# drafts would have brought: to **everybody** on the mesh, for the sake of the one slot that is near its end.

# %%
rows = [["", "decode launches", "of them K = 0", "tokens a slot and launch"]]
for rule, run in runs.items():
    launches = by_launch(run)
    zeros = sum(next(iter(records.values())).draft_len == 0 for records in launches.values())
    emitted = [len(record.emitted) for records in launches.values() for record in records.values()]
    rows.append([rule, str(len(launches)), str(zeros), f"{np.mean(emitted):.2f}"])
print(table(rows))

# %% [markdown]
# ## The vote
#
# Each data shard may wish for another K. Processes must agree before they launch, or their collectives would not
# meet. So wishes travel with an earlier launch, are reduced inside it by one elementwise maximum of a few integers,
# and come back with results that are read anyway. The smallest wish of those that have something to decode wins; who
# has nothing to do abstains.
#
# Here every shard has a script of wishes. Two requests are short: when they are done, their shards go on wishing 0,
# and nobody hears it.

# %%
rng = np.random.default_rng(1)
wishes = rng.choice([1, 2, 3], size=(SHARDS, 40), p=[0.06, 0.12, 0.82])
short = {2: 4, 5: 6}  # request: tokens
lengths = [short.get(i, 44) for i in range(SHARDS)]
engine = restart(mesh, policies=[ScriptedDraftLen(tuple(row.tolist())) for row in wishes])
homes = {}


def note_homes(engine):
    for shard, scheduler in enumerate(engine.group.shards):
        homes.update({int(slot.state.request.request_id): shard for slot in scheduler.slots})


vote_run = run_plan(engine, batch(lengths), after_step=note_homes)
for request in short:
    wishes[homes[request], 14:] = 0
engine = restart(mesh, policies=[ScriptedDraftLen(tuple(row.tolist())) for row in wishes])
vote_run = run_plan(engine, batch(lengths))
launches = by_launch(vote_run)
agreed = [next(iter(records.values())).draft_len for records in launches.values()]
HEARD = 18  # decode launches in which nobody but the two short requests comes to an end
working = np.zeros((SHARDS, len(launches)), bool)
for step, records in enumerate(launches.values()):
    for request in records:
        working[homes[request], step] = True

fig, (top, bottom) = plt.subplots(2, 1, figsize=(9, 4.6), height_ratios=[3, 1], sharex=True)
shown = np.where(working, wishes[:, : len(launches)], np.nan)
image = top.imshow(shown, aspect="auto", cmap="viridis", vmin=0, vmax=KMAX)
top.set(ylabel="data shard", yticks=range(SHARDS), title="wishes of the shards that decode (white: nothing to decode)")
top.grid(visible=False)
fig.colorbar(image, ax=top, label="wish", ticks=range(KMAX + 1))
smallest = [min(wishes[working[:, step], step]) for step in range(len(launches))]
lag = engine.config.readback_depth
bottom.step(range(len(launches)), agreed, where="mid", label="agreed")
bottom.plot(np.arange(len(launches)) + lag, smallest, "k.", markersize=5, label=f"smallest wish, {lag} later")
bottom.set(xlabel="decode launch", ylabel="K", ylim=(-0.2, KMAX + 0.4), yticks=range(KMAX + 1))
bottom.legend(loc="lower left", ncols=2)
plt.show()

# %% [markdown]
# A wish is in force some launches after it was made: that is how long it travels. At the end the agreed K falls
# below the smallest wish: no step is longer than its most demanding slot can use.
#
# ## What a zero costs the drafter: nothing
#
# A step without drafts still brings the drafter's own cache up to date. So the drafts after some zeros are those
# that would have been made without them: below, one request under K = 3 in every step and under a schedule full of
# zeros. Wherever both come to the same place in the text, they draft the same.

# %%
single = toy_engine(FAMILY)
request = [Request("0", (3, 1, 4), SamplingParams(temperature=0, max_tokens=44), seed=0, wants_trace=True)]
patterns = {"K = 3 always": (3,), "3, 0, 0, 0, 3, 0, ...": (3, 0, 0, 0, 3, 0, 0, 3, 3, 0, 0, 0, 0, 3, 0, 3)}
at_place, gains = {}, {}
fig, ax = plt.subplots(figsize=(8, 3))
for name, pattern in patterns.items():
    run = run_plan(restart(single, policy=ScriptedDraftLen(pattern)), request)
    records = run.finished["0"].state.records
    at_place[name] = {record.committed_len_before: record.drafts for record in records if record.drafts}
    gains[name] = len(records)
    ax.step(
        range(len(records) + 1), [*accumulate((len(r.emitted) for r in records), initial=1)], where="post", label=name
    )
ax.set(xlabel="decode steps", ylabel="tokens written", title="the same 44 tokens, sooner or later")
ax.legend()
plt.show()
both = [place for place in at_place["K = 3 always"] if place in at_place["3, 0, 0, 0, 3, 0, ..."]]
alike = [all(a == b for a, b in zip(*(drafts[place] for drafts in at_place.values()), strict=False)) for place in both]
print(f"{len(both)} places in the text where both draft; the same drafts in {sum(alike)} of them")

# %% [markdown]
# ## What a zero costs in time
#
# A program for K = 0 is slower than that of an engine without a drafter, since it keeps the drafter's cache. How
# much, was recorded with the bundled model (`docs/measurements`, see there for the commands):

# %%
import json
from pathlib import Path

rows = [["", "date", "plain, tokens/s", "K = 0 of plain", "K = 3 of plain"]]
for path in sorted(Path("../docs/measurements").glob("*decode*.json")):
    measured = json.loads(path.read_text())
    by_name = {result["name"]: result for result in measured["results"]}
    for dtype in dict.fromkeys(result.get("dtype") for result in measured["results"]):
        if f"{dtype}, K = 0" not in by_name:
            continue
        plain, zero, three = (by_name[f"{dtype}, {what}"] for what in ("plain", "K = 0", "K = 3"))
        ratios = [f"{zero['x_plain']:.2f}", f"{three['x_plain']:.2f}"]
        rows.append([f"{measured['chip']}, {dtype}", measured["date"], f"{plain['tokens_per_s']:.0f}", *ratios])
print(table(rows))

# %% [markdown]
# ## What holds


# %%
def plain_tokens(request):
    return plain_decode(FAMILY.plain_logits, request, max_model_len=LONGEST).tokens


for rule, run in runs.items():
    texts = {request.request_id: plain_tokens(request) for request in near_limit}
    claim(
        f"under {rule} every text is plain decoding's",
        all(tuple(run.finished[i].state.tokens) == texts[i] for i in texts),
    )
claim(
    "group_zero took more launches than row_cap", len(by_launch(runs["group_zero"])) > len(by_launch(runs["row_cap"]))
)
claim(
    "the agreed K is the smallest wish of those that decode, a little later",
    agreed[lag:HEARD] == smallest[: HEARD - lag],
)
claim("shards without work drag nobody to 0", 0 in wishes[homes[2], :HEARD] and min(agreed[:HEARD]) > 0)
claim(
    "voted texts are plain decoding's",
    all(tuple(vote_run.finished[r.request_id].state.tokens) == plain_tokens(r) for r in batch(lengths)),
)
claim("drafts after zeros are the drafts without them", all(alike) and len(both) > 3)
