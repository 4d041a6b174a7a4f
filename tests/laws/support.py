"""The engines that the laws run on, built once a process, and the comparison with plain decoding."""

import functools
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.topology import Tree
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.requests import Progress, Request, StepRecord
from mtp_jax.models.shortlist import shortlist_ids
from mtp_jax.proposers.from_text import FromText
from mtp_jax.proposers.lookup_first import LookupFirst
from mtp_jax.proposers.ngram import PromptLookup
from mtp_jax.testing.driving import Run
from mtp_jax.testing.engines import toy_engine
from mtp_jax.testing.oracle import PlainResult, plain_decode, plain_drafts, plain_lookup
from mtp_jax.testing.toy_family import ToyFamily
from mtp_jax.testing.tree_oracle import check_tree, score_tree

THREE_SLOTS = functools.partial(toy_engine)
PAGES_OF_1 = functools.partial(
    toy_engine, ToyFamily(latent=True), page_size=1, prefill_chunk=5, max_num_seqs=1, max_model_len=80
)
PAGES_OF_16 = functools.partial(
    toy_engine,
    ToyFamily(num_mtp_layers=3, latent=True),
    page_size=16,
    prefill_chunk=3,
    max_num_seqs=2,
    max_model_len=80,
)
PAGES_OF_64 = functools.partial(
    toy_engine,
    ToyFamily(num_mtp_layers=2),
    method="mtp_eagle",
    page_size=64,
    max_num_seqs=1,
    max_model_len=80,
)
TWO_MTP_LAYERS = functools.partial(
    toy_engine, ToyFamily(num_mtp_layers=2), max_draft_len=2, prefill_chunk=1, max_num_seqs=2, max_model_len=40
)
LOOKUP = functools.partial(
    toy_engine, ToyFamily(vocab_size=4), method="ngram", max_num_seqs=2, max_model_len=40, prompt_lookup_min=1
)
LOOKUP_FIRST = functools.partial(
    toy_engine,
    ToyFamily(vocab_size=4),
    method="ngram_mtp",
    max_draft_len=2,
    max_num_seqs=1,
    max_model_len=40,
    prompt_lookup_min=2,
)
SHORTLIST = functools.partial(
    toy_engine, ToyFamily(num_mtp_layers=2), max_draft_len=2, max_num_seqs=1, max_model_len=40, draft_vocab_size=16
)
TREE = functools.partial(toy_engine, method="dynamic_tree", tree_topk=3, tree_nodes=8, page_size=4)
TREE_OF_WIDE_DRAFTER = functools.partial(
    toy_engine,
    ToyFamily(latent=True, draft_flatness=2.0),
    method="dynamic_tree",
    draft_sampling="greedy",
    tree_topk=4,
    tree_nodes=5,  # fewer rows than the drafter's eight
    page_size=1,
    prefill_chunk=5,
    max_num_seqs=1,
    max_model_len=40,
)
ENGINES: dict[str, Callable[[], Engine]] = {
    "recursive, pages of 4, three slots": THREE_SLOTS,
    "recursive, latent, pages of 1, chunks of 5": PAGES_OF_1,
    "three MTP layers, latent, pages of 16, chunks of 3, two slots": PAGES_OF_16,
    "first of two MTP layers again and again, pages of 64": PAGES_OF_64,
    "two MTP layers, pages of 4, chunks of 1, two slots": TWO_MTP_LAYERS,
    "two MTP layers over a shortlist": SHORTLIST,
    "trees of 8, pages of 4, three slots": TREE,
    "trees of 5 under a wider drafter, argmax drafts, latent, pages of 1": TREE_OF_WIDE_DRAFTER,
    "prompt lookup, two slots": LOOKUP,
    "prompt lookup, then an MTP layer": LOOKUP_FIRST,
}


def expected_drafts(engine: Engine, request: Request, text: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    """What the engine's proposer must say after `text`; `num_drafts` of it, or nothing where it must say nothing."""
    proposer = engine.program.proposer
    lookup = proposer.lookup if isinstance(proposer, LookupFirst) else None
    if isinstance(proposer, FromText) and isinstance(proposer.draft, PromptLookup):
        lookup = proposer.draft
    if lookup is not None:
        drafts, match_len = plain_lookup(text, num_drafts, lookup.max_match)
        if match_len >= lookup.min_match:
            return drafts
        if not isinstance(proposer, LookupFirst):
            return ()
    listed = shortlist_ids(engine.launcher.weights)
    if listed is None:
        return plain_drafts(toy(engine).plain_draft_logits, request, text, num_drafts)

    def over_shortlist(tokens: Sequence[int]) -> np.ndarray:
        logits_V = toy(engine).plain_draft_logits(tokens)
        return np.where(np.isin(np.arange(len(logits_V)), listed), logits_V, -np.inf).astype(np.float32)

    return plain_drafts(over_shortlist, request, text, num_drafts)


def toy(engine: Engine) -> ToyFamily:
    return cast("ToyFamily", engine.family)


def request(
    request_id: str, prompt: Sequence[int], *, seed: int = 0, eos: Sequence[int] = (), **params: object
) -> Request:
    return Request(
        request_id,
        tuple(prompt),
        SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
        eos_token_ids=tuple(eos),
        wants_trace=True,
    )


def plain(engine: Engine, request: Request) -> PlainResult:
    return plain_decode(toy(engine).plain_logits, request, max_model_len=engine.config.max_model_len)


def assert_plain(engine: Engine, requests: Sequence[Request], run: Run) -> None:
    """Everyone who was not cancelled got plain decoding's tokens, and was offered the drafts that its text defines."""
    for one in requests:
        if one.request_id not in run.cancelled:
            assert_one_plain(engine, one, run.finished[one.request_id])


def assert_one_plain(engine: Engine, request: Request, last: Progress) -> None:
    expected = plain(engine, request)
    assert tuple(last.state.tokens) == expected.tokens
    assert (last.finish_reason, last.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert_plain_logprobs(request, last, expected)
    text = (*request.prompt, *expected.tokens)
    for record in last.state.records:
        known = text[: record.committed_len_before + 1]
        if record.parents is None:
            assert record.drafts == expected_drafts(engine, request, known, len(record.drafts))
        else:
            assert_best_tree(engine, request, known, record)


def assert_plain_logprobs(request: Request, last: Progress, expected: PlainResult) -> None:
    """Whatever drafted, and through preemption: of every token once, or of none. Raw, so edits do not show in them."""
    entries = last.state.logprobs
    if request.params.logprobs is None:
        assert entries == []
        return
    assert tuple(entry.token for entry in entries) == expected.tokens
    # float32 log-softmax of logits below 8 in absolute value: a few units of the last place of 8.
    np.testing.assert_allclose([entry.logprob for entry in entries], expected.logprobs, rtol=0, atol=1e-5)


def assert_best_tree(engine: Engine, request: Request, known: Sequence[int], record: StepRecord) -> None:
    speculative = engine.config.speculative
    shape = speculative.topology
    assert isinstance(shape, Tree)
    assert record.parents is not None
    is_coupled = speculative.draft_sampling == "coupled"
    law = toy(engine).plain_draft_logits
    scored = score_tree(law, request, known, shape, draft_len=record.draft_len, is_coupled=is_coupled)
    is_whole = len(record.drafts) == shape.num_drafts(record.draft_len)
    check_tree(scored, record.drafts, record.parents, is_whole=is_whole)
