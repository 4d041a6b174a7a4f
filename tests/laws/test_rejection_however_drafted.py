"""Rejection sampling keeps the law however drafts are made, whatever a request does to its logits, under every cap.

The proposers are those of the table, over a drafter that is a table of logits; the law is `mtp_jax.testing.oracle`'s.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import pytest
from jaxtyping import Array

from mtp_jax.acceptance import rejection
from mtp_jax.acceptance.judging import judge_tokens
from mtp_jax.acceptance.rejection import Rejection
from mtp_jax.core.config import SamplingParams, SpeculativeConfig
from mtp_jax.core.types import Drafts, LayerKV, SlotView
from mtp_jax.models.bound import BoundModel, Rows
from mtp_jax.ops.laws import row_probs
from mtp_jax.ops.sampling import law_of_head
from mtp_jax.proposers import drawing, lookup_first, mtp
from mtp_jax.proposers.drawing import with_next_draft
from mtp_jax.proposers.features import Features
from mtp_jax.proposers.registry import PROPOSERS
from mtp_jax.testing.toy_family import ToyFamily
from tests.laws.rejection import Bench, logits, reversed_law, surprise_of_texts
from tests.laws.test_rejection_drawn import BOUND, top_p_first

VOCAB, KMAX = 6, 2
IDS = (0, 2, 3, 5)
"""Of a drafter with a vocabulary of its own."""
PROMPT = (0, 1, 2, 0)  # what is looked up in it is found at once
TOKENS, BLOCK = Rejection(), Rejection(block_verification=True)
TARGET = logits(VOCAB, 1)
TABLES = (reversed_law(TARGET), logits(VOCAB, 2))  # one for each MTP layer

EDITS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
    "bad_words": {"bad_words": [(1,), (2, 3), (0, 2, 2)]},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (3, 4)},
    "logit_bias": {"logit_bias": {0: 1.0, 3: -1.5}},
    "min_p": {"min_p": 0.15},
    "filters": {"temperature": 1.3, "top_k": 5, "top_p": 0.9},
}
ALL_EDITS = {name: value for edit in EDITS.values() for name, value in edit.items()}


@dataclass(frozen=True, eq=False)
class TableModel(BoundModel):
    """MTP layers that speak by the last token alone, each by a table of its own; their hidden state is that token."""

    ids_N: Array | None = None

    @property
    def draft_ids(self) -> Array | None:
        return self.ids_N

    def draft(
        self, depth: int, tokens_BW: Array, hidden_BWD: Array, rows: Rows, draft_kv: tuple[LayerKV, ...]
    ) -> tuple[Array, Array, tuple[LayerKV, ...]]:
        hidden_BW1 = tokens_BW[..., None].astype(jnp.float32)
        return hidden_BW1, hidden_BW1, draft_kv

    def draft_unembed(self, depth: int, hidden_BWD: Array) -> Array:
        table_VV = jnp.array(TABLES[depth])
        logits_BWV = table_VV[hidden_BWD[..., 0].astype(jnp.int32)]
        return logits_BWV if self.ids_N is None else logits_BWV[..., self.ids_N]


def drafting(method: str, *, has_ids: bool = False, **options: Any) -> Callable[[SlotView, int], Drafts]:
    """A method of the table, as a bench calls it."""
    family = ToyFamily(vocab_size=VOCAB, num_mtp_layers=2 if method == "mtp_vanilla" else 1)
    spec = SpeculativeConfig(method=method, acceptance="rejection", num_speculative_tokens=KMAX, **options)
    proposer = PROPOSERS[method].build(family, spec)

    def draft(slots: SlotView, draft_len: int) -> Drafts:
        model = TableModel(family, {}, "reference", ids_N=jnp.array(IDS) if has_ids else None)
        pending_B1 = slots.pending_token[:, None]
        carry = Features(jnp.zeros((*pending_B1.shape, 1)), pending_B1, jnp.ones_like(slots.pending_token))
        return proposer.propose(model, carry, (), slots, draft_len=draft_len)[0]

    return draft


METHODS: dict[str, dict[str, Any]] = {
    "mtp_eagle": {},
    "mtp_eagle over a shortlist": {"method": "mtp_eagle", "has_ids": True},
    "mtp_eagle, argmax drafts": {"method": "mtp_eagle", "draft_sampling": "greedy"},
    "mtp_vanilla": {},
    "eagle3": {"has_ids": True},
    "ngram": {"prompt_lookup_min": 1},
    "ngram_mtp": {"prompt_lookup_min": 2},
}


LEFT_OUT = ("mtp_eagle", "mtp_eagle, argmax drafts")
"""What the default run leaves out: the first is there over a shortlist, the second in `test_rejection_drawn`."""


def bench(method: str, edits: dict[str, Any], rule: Rejection = TOKENS, caps: tuple[int, ...] = ()) -> Bench:
    """Of all slots a third has each cap, where `caps` names three."""
    draft = drafting(**{"method": method, **METHODS[method]})
    params = SamplingParams(**{"temperature": 1.0, **edits})
    return Bench(rule, TARGET, TABLES[0], params, num_slots=20_000, draft=draft, prompt=PROMPT, caps=caps)


def surprise(one: Bench, draft_lens: tuple[int, ...] = (KMAX,) * 3) -> float:
    return surprise_of_texts(one, draft_lens)


def test_every_method_that_drafts_chains_is_here() -> None:
    others = {None, "dynamic_tree", "mtp"}  # nothing, trees, and one of those that are
    assert {case.get("method", name) for name, case in METHODS.items()} == {*PROPOSERS} - others


@pytest.mark.parametrize("rule", [TOKENS, pytest.param(BLOCK, marks=pytest.mark.long)], ids=["tokens", "block"])
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.long] * (name in LEFT_OUT)) for name in METHODS]
)
def test_b08_three_tokens_keep_their_joint_law_however_drafts_are_made(method: str, rule: Rejection) -> None:
    """Everything that a request can do to its logits at once; drafts, then none, then drafts again."""
    assert surprise(bench(method, ALL_EDITS, rule), (KMAX, 0, KMAX)) < BOUND


@pytest.mark.long
@pytest.mark.parametrize("edit", EDITS)
def test_three_tokens_keep_the_law_that_a_request_asks_for(edit: str) -> None:
    assert surprise(bench("mtp_eagle", EDITS[edit], BLOCK)) < BOUND


@pytest.mark.parametrize(("method", "rule"), [("mtp_vanilla", TOKENS), ("ngram_mtp", BLOCK)], ids=["tokens", "block"])
def test_capped_slots_keep_their_law(method: str, rule: Rejection) -> None:
    """Of two drafts none, one or both are there."""
    assert surprise(bench(method, {}, rule, caps=(0, 1, 2))) < BOUND


# ---- the checks above are shown to notice faults


def with_stale_law(earlier: Drafts, *rest: Any) -> Drafts:
    """The law of a draft is that of the one before it; of the first that of the second."""
    drafts = with_next_draft(earlier, *rest)
    if drafts.probs_BKV is None or drafts.tokens_BK.shape[1] < KMAX:
        return drafts
    return replace(drafts, probs_BKV=jnp.roll(drafts.probs_BKV, 1, axis=1))


def copies_under_the_drafters_law(found: Drafts, drafts: Drafts, draft_len: int) -> Drafts:
    """What was looked up is judged as if the MTP layer had drawn it."""
    is_found_B = found.num_proposed == draft_len
    return replace(drafts, tokens_BK=jnp.where(is_found_B[:, None], found.tokens_BK, drafts.tokens_BK))


def blind_to_drafts(slots: SlotView, drafts: Drafts) -> Any:
    """Penalties and bad words see the text without the drafts of the launch."""
    text = texts_of_rows(slots, drafts)
    return replace(text, is_before_BWK=jnp.zeros_like(text.is_before_BWK))


texts_of_rows = rejection.texts_of_rows


def cap_forgotten(drafts: Drafts, p_BWV: Array, cap_B: Array, coins_BK: Array) -> Any:
    """Of a capped chain that stands whole: the token that follows is drawn as if the next draft had fallen."""
    is_capped_B = cap_B < drafts.tokens_BK.shape[1]
    column_1K = jnp.arange(drafts.tokens_BK.shape[1])[None, :]
    coins_BK = jnp.where(column_1K >= cap_B[:, None], jnp.inf, coins_BK)
    return judge_tokens(drafts, p_BWV, cap_B + is_capped_B.astype(jnp.int32), coins_BK)


@pytest.mark.parametrize("method", ["mtp_eagle over a shortlist", "mtp_vanilla"])
def test_a_law_that_is_another_drafts_is_noticed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp, "with_next_draft", with_stale_law)
    assert surprise(bench(method, {})) > 2 * BOUND


@pytest.mark.parametrize(
    ("method", "edits", "caps", "module", "name", "fault"),
    [
        ("ngram_mtp", {}, (), lookup_first, "_instead", copies_under_the_drafters_law),
        ("mtp_eagle", EDITS["penalties"], (), rejection, "texts_of_rows", blind_to_drafts),
        ("mtp_vanilla", {}, (0, 1, 2), rejection, "judge_tokens", cap_forgotten),
    ],
    ids=["copies", "penalties", "caps"],
)
def test_faults_are_noticed(
    method: str,
    edits: dict[str, Any],
    caps: tuple[int, ...],
    module: Any,
    name: str,
    fault: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, fault)
    assert surprise(bench(method, edits, caps=caps)) > 2 * BOUND


def test_drafts_drawn_by_other_filters_than_their_law_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p before temperature, on the drafter's side: harmless in the law that drafts are drawn from and that goes
    along, and a fault where it is in one of the two.
    """
    monkeypatch.setattr(drawing, "law_of_head", top_p_first)
    assert surprise(bench("mtp_eagle", EDITS["filters"])) < BOUND

    drawn_from: list[Array] = []

    def law(*arguments: Any) -> Array:
        drawn_from.append(row_probs(top_p_first(*arguments), arguments[1]))
        return law_of_head(*arguments)

    monkeypatch.setattr(drawing, "law_of_head", law)
    draw = drawing.draw
    monkeypatch.setattr(drawing, "draw", lambda probs, noise: draw(drawn_from.pop(), noise))
    assert surprise(bench("mtp_eagle", EDITS["filters"])) > 2 * BOUND
