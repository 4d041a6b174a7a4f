# %% [markdown]
# # Your own proposer, rule and policy
#
# How to draft, which drafts stand, and how many to draft: three seams, each a small frozen object with a table.
# Below is one of each, about twenty lines long, written in a cell and not in the package, and tested with
# `mtp_jax.testing`: against an oracle that decodes one token at a time, on requests that Hypothesis makes up.

# %%
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from hypothesis import find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from mtp_jax import LLM, SamplingParams
from mtp_jax.acceptance.api import accepted_prefix_len
from mtp_jax.acceptance.match import Match
from mtp_jax.acceptance.registry import RULES
from mtp_jax.bench.tables import table
from mtp_jax.core.types import Drafts
from mtp_jax.ops.sharding import NO_PARALLEL
from mtp_jax.policies.api import PolicyView
from mtp_jax.policies.registry import POLICIES
from mtp_jax.proposers.from_text import FromText
from mtp_jax.proposers.method import Method
from mtp_jax.proposers.registry import PROPOSERS
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import poison, restart, toy_engine
from mtp_jax.testing.oracle import plain_decode
from mtp_jax.testing.rows import sampling_rows, slot_view
from mtp_jax.testing.strategies import batches, plans, step_stats
from mtp_jax.testing.toy_family import ToyFamily

plt.style.use("style.mplstyle")
QUICK = settings(max_examples=60, deadline=None, database=None, derandomize=True)


def claim(sentence, holds):
    assert holds, sentence
    print("holds:", sentence)


# %% [markdown]
# ## A proposer
#
# Drafts what followed the last earlier place where the same token stood. It needs no model and keeps nothing between
# steps, so one function of the slots is enough; `FromText` is the rest. `history_BS` holds each slot's tokens by
# position, the pending token at `committed_len` included; `num_proposed` says how many drafts are meant.


# %%
@dataclass(frozen=True)
class AfterTheSameToken:
    """What followed the last earlier place of the pending token; nothing where it is new."""

    def __call__(self, slots, draft_len):
        position_1S = jnp.arange(slots.history_BS.shape[1], dtype=jnp.int32)[None, :]
        committed_B1 = slots.committed_len[:, None]
        is_same_BS = (slots.history_BS == slots.pending_token[:, None]) & (position_1S < committed_B1)
        place_B1 = jnp.max(jnp.where(is_same_BS, position_1S, -1), axis=1, keepdims=True)
        source_BK = place_B1 + 1 + jnp.arange(draft_len, dtype=jnp.int32)[None, :]
        tokens_BK = jnp.take_along_axis(slots.history_BS, jnp.minimum(source_BK, committed_B1), axis=1)
        num_proposed = jnp.sum((source_BK <= committed_B1) & (place_B1 >= 0), axis=1, dtype=jnp.int32)
        return Drafts(tokens_BK, num_proposed=num_proposed)


PROPOSERS["after_same"] = Method(lambda family, spec: FromText(AfterTheSameToken()))

# %% [markdown]
# Looked at by itself first: a slot with the text 5 8 9 5 8, the last 8 pending, must propose 9 5 8.

# %%
slots = slot_view(
    sampling_rows(SamplingParams(temperature=0)),
    vocab_size=12,
    draft_len=3,
    committed_len=[4],
    pending_token=jnp.array([8]),
    history_BS=jnp.array([[5, 8, 9, 5, 8, 0, 0, 0]]),
)
drafts = AfterTheSameToken()(slots, 3)
print("drafts", drafts.tokens_BK.tolist(), "of which meant:", drafts.num_proposed.tolist())

# %% [markdown]
# ## A rule
#
# As `match`, but a draft must also be the target's likeliest token by some margin of logits. That gives drafts away,
# and changes no text: every token emitted is still the target's own. (Where might one want it? Where two kernels may
# differ in a tie, and one would rather see the tie decided by the program for one row.)


# %%
@dataclass(frozen=True)
class MatchByMargin:
    """A draft stands if it is the target's token, and the target's likeliest by `margin`."""

    margin: float
    takes_trees: bool = False

    def accept(self, drafts, target_logits_BWV, slots, parallel):
        matched = Match().accept(drafts, target_logits_BWV, slots, parallel)
        top_BK2, _ = jax.lax.top_k(target_logits_BWV[:, :-1], 2)
        is_clear_BK = top_BK2[..., 0] - top_BK2[..., 1] >= self.margin
        return replace(
            matched, num_accepted=jnp.minimum(matched.num_accepted, accepted_prefix_len(is_clear_BK, slots.draft_cap))
        )


RULES["margin"] = lambda spec: MatchByMargin(0.05)

# %% [markdown]
# A rule is a function of arrays, so it can be tried on any of them. The law here is a loop of four lines; Hypothesis
# looks for logits, drafts and caps where rule and loop differ. To see that it would find something, the same is done
# with a rule that has a fault: it forgets the slots' caps.

# %%
K, VOCAB, MARGIN = 3, 5, 0.5
logits = st.lists(st.lists(st.integers(0, 3), min_size=VOCAB, max_size=VOCAB), min_size=K + 1, max_size=K + 1)
cases = st.tuples(logits, st.lists(st.integers(0, VOCAB - 1), min_size=K, max_size=K), st.integers(0, K))
greedy = slot_view(sampling_rows(SamplingParams(temperature=0)), vocab_size=VOCAB, draft_len=K)


def by_loop(logits, drafts, cap):
    count = 0
    while count < cap and np.argmax(logits[count]) == drafts[count]:
        second, first = sorted(logits[count])[-2:]
        if first - second < MARGIN:
            break
        count += 1
    return count


def by_rule(rule):
    @jax.jit
    def accepted(logits, drafts, cap):
        slots = replace(greedy, draft_cap=cap)
        return rule.accept(Drafts(drafts), logits, slots, NO_PARALLEL).num_accepted

    return lambda logits, drafts, cap: int(
        accepted(jnp.array([logits], jnp.float32), jnp.array([drafts]), jnp.array([cap]))[0]
    )


@dataclass(frozen=True)
class Forgetful(MatchByMargin):
    """The fault: drafts past the cap are looked at."""

    def accept(self, drafts, target_logits_BWV, slots, parallel):
        whole = replace(slots, draft_cap=jnp.full_like(slots.draft_cap, drafts.tokens_BK.shape[1]))
        return super().accept(drafts, target_logits_BWV, whole, parallel)


def counterexample(rule):
    accepted = by_rule(rule)
    try:
        return find(cases, lambda case: accepted(*case) != by_loop(*case), settings=settings(QUICK, max_examples=400))
    except NoSuchExample:
        return None


right, wrong = counterexample(MatchByMargin(MARGIN)), counterexample(Forgetful(MARGIN))
print("MatchByMargin:", "no counterexample" if right is None else right)
print("Forgetful:    ", f"drafts {wrong[1]}, cap {wrong[2]}, logits {wrong[0]}" if wrong else "no counterexample")

# %% [markdown]
# ## A policy
#
# One draft more after a step in which all drafts stood, half as many after one in which none did. Policies are
# immutable and know nothing of jax; they see counts, late.


# %%
@dataclass(frozen=True)
class GrowAndHalve:
    """Between 1 and Kmax, by what became of the last step's drafts."""

    length: int = 1

    @property
    def is_voted(self):
        return True  # what shards have learnt may differ

    def choose(self, view):
        return min(self.length, view.max_draft_len)

    def update(self, stats):
        if not stats.drafted:
            return self
        if len(stats.accepted) == len(stats.drafted) and stats.accepted[-1] == stats.drafted[-1]:
            return GrowAndHalve(self.length + 1)
        return GrowAndHalve(max(self.length // 2, 1)) if sum(stats.accepted) == 0 else self


POLICIES["grow"] = lambda spec, costs: GrowAndHalve()


@QUICK
@given(history=st.lists(step_stats(3, slot_buckets=(1, 8)), max_size=30))
def test_a_length_is_always_in_range(history):
    policy = GrowAndHalve()
    for number, stats in enumerate(history):
        policy = policy.update(stats)
        for longest in (1, 2, 3):
            assert 0 <= policy.choose(PolicyView(1, 1, longest, number)) <= longest


try:
    test_a_length_is_always_in_range()
    policy_holds = True
except AssertionError as error:
    policy_holds = False
    print(error)
print("range of lengths:", "held in every history" if policy_holds else "broken")

# %% [markdown]
# ## All three in one engine, against plain decoding
#
# The law of the project: under a rule that keeps tokens, whatever is drafted, however much, with whomever in the
# batch, the tokens are those of plain decoding. The engine compiles once over the toy family; `restart` gives it
# empty books for each example; `poison` fills all that was not written with NaN; `run_plan` checks pages, seats and
# each request's records after every step, while requests arrive, are preempted and cancelled.

# %%
FAMILY = ToyFamily()
engine = toy_engine(method="after_same", acceptance="margin")
num_requests, num_steps = 0, 0


@settings(QUICK, max_examples=25)
@given(
    batch=batches(FAMILY.vocab_size, max_model_len=48),
    plan=plans(5),
    depth=st.sampled_from((0, 1, 2)),
    num_pages=st.integers(12, 36),
)
def test_tokens_are_plain_decodings(batch, plan, depth, num_pages):
    global num_requests, num_steps
    again = restart(engine, policy=GrowAndHalve(), readback_depth=depth, num_pages=num_pages)
    poison(again)
    run = run_plan(again, batch, plan)
    for request in batch:
        if request.request_id in run.finished:
            expected = plain_decode(FAMILY.plain_logits, request, max_model_len=48)
            assert tuple(run.finished[request.request_id].state.tokens) == expected.tokens
            num_requests += 1
    num_steps += run.num_steps


test_tokens_are_plain_decodings()
print(f"{num_requests} requests in {num_steps} steps, each equal to plain decoding")

# %% [markdown]
# ## On the bundled model
#
# What was registered can be asked for by name. Exact it is by now; whether it is any good is another question, which
# only acceptance on text answers. Here: code in which names come again, and greedy decoding.

# %%
llm = LLM(
    "tiny-mtp",
    speculative_config={"method": "after_same", "acceptance": "margin", "policy": "grow", "num_speculative_tokens": 3},
    max_num_seqs=1,
    max_model_len=256,
    prefill_chunk=16,
)
PROMPT = "x = data[0]\ny = data[1]\nz = data[2]\nw = data"
records = list(llm.trace(PROMPT, SamplingParams(temperature=0, max_tokens=72, ignore_eos=True)))
fig, ax = plt.subplots(figsize=(9, 3))
ax.bar(range(len(records)), [len(r.drafts) for r in records], color="#f3c9b3", label="drafts made")
ax.bar(range(len(records)), [r.num_accepted for r in records], color="#3a9a5b", label="drafts kept")
ax.step(range(len(records)), [r.draft_len for r in records], where="mid", color="black", linewidth=1, label="K chosen")
ax.set(xlabel="decode step", ylabel="drafts", yticks=range(4))
ax.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
plt.show()
made, kept = (sum(counts) for counts in zip(*((len(r.drafts), r.num_accepted) for r in records), strict=True))
num_tokens = sum(len(record.emitted) for record in records)
print(table([["steps", "tokens", "drafts", "kept"], [*map(str, (len(records), num_tokens, made, kept))]]))

# %% [markdown]
# ## What holds

# %%
claim("the proposer drafts what followed", drafts.tokens_BK.tolist() == [[9, 5, 8]])
claim("the rule is the loop", right is None)
claim("a rule that forgets the caps is found out", wrong is not None)
claim("the policy keeps its range", policy_holds)
claim("all three together write plain decoding's tokens", num_requests > 25)
claim("some drafts stood", kept > 0)
