"""The law of rejection sampling two ways: every interval of every coin tried once, and draws from bare rules."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mtp_jax.acceptance.api import AcceptanceRule
from mtp_jax.acceptance.judging import Judge
from mtp_jax.core.config import SamplingParams
from mtp_jax.core.types import Accepted, Drafts, SamplingRows, SlotView
from mtp_jax.engine.requests import Request
from mtp_jax.ops.sharding import NO_PARALLEL
from mtp_jax.proposers.drawing import DraftSampling, with_next_draft
from mtp_jax.testing.oracle import edited_logits, filtered_logits
from mtp_jax.testing.rows import sampling_rows, slot_view

Text = tuple[int, ...]
Law = Callable[[Text], Float[np.ndarray, " V"]]
"""Probabilities of the next token after a text."""

ALMOST_ONE = 1 - 2**-24  # the largest coin there is


def random_law(vocab_size: int, seed: int, *, num_zeros: int = 0) -> Law:
    """A law that differs after every text; after some of them the first `num_zeros` tokens never come."""

    @functools.cache
    def law(text: Text) -> Float[np.ndarray, " V"]:
        rng = np.random.default_rng([seed, *text, len(text)])
        probs_V = rng.dirichlet(np.full(vocab_size, 0.7))
        if num_zeros and rng.random() < 0.5:
            probs_V[rng.permutation(vocab_size)[:num_zeros]] = 0
        return probs_V.astype(np.float32) / probs_V.astype(np.float32).sum()

    return law


def joint_law(law: Law, length: int, text: Text = ()) -> dict[Text, float]:
    """The law of the next `length` tokens."""
    if length == 0:
        return {(): 1.0}
    return {
        (token, *rest): float(law(text)[token]) * share
        for token in np.flatnonzero(law(text) > 0).tolist()
        for rest, share in joint_law(law, length - 1, (*text, token)).items()
    }


@dataclass(frozen=True)
class Chain:
    """A target, a drafter and a judge. `is_one_hot`: the drafter always proposes its likeliest token."""

    judge: Judge
    target: Law
    drafter: Law
    vocab_size: int
    is_one_hot: bool = False
    is_block: bool = False

    def step(self, text: Text, draft_len: int, cap: int | None = None) -> Iterator[tuple[float, int, Text]]:
        """(probability, drafts accepted, tokens emitted) of everything one step can do after `text`."""
        cap = draft_len if cap is None else cap
        cases = [*self._cases(text, draft_len, cap)]
        # As many as there can be, so that one program serves every text; those added weigh nothing.
        cases += [replace(cases[0], probability=0.0)] * ((2 * self.vocab_size) ** draft_len - len(cases))
        drafts = Drafts(
            jnp.array([case.drafts for case in cases], jnp.int32).reshape(len(cases), draft_len),
            None if self.is_one_hot else _stacked([case.draft_probs for case in cases]),
        )
        target_probs_BWV = _stacked([case.target_probs for case in cases])
        draft_cap_B = jnp.full((len(cases),), cap, jnp.int32)
        verdicts = []
        for side in range(2):  # at both ends of every interval of a coin
            coins_BK = jnp.array([case.coins[side] for case in cases], jnp.float32).reshape(len(cases), draft_len)
            verdicts.append(jitted(self.judge)(drafts, target_probs_BWV, draft_cap_B, coins_BK))
        num_accepted, _, weights_BV = map(np.asarray, verdicts[0])
        np.testing.assert_array_equal(num_accepted, verdicts[1][0])
        for case, length, weights_V in zip(cases, num_accepted.tolist(), weights_BV.astype(np.float64), strict=True):
            if case.probability == 0:
                continue
            assert (weights_V >= 0).all()
            assert weights_V.sum() > 0
            for token in np.flatnonzero(weights_V).tolist():
                share = case.probability * weights_V[token] / weights_V.sum()
                yield share, length, (*case.drafts[:length], token)

    def emitted(self, draft_lens: Sequence[int], length: int, text: Text = ()) -> dict[Text, float]:
        """The law of the first `length` tokens of steps with these draft lengths."""
        law: dict[Text, float] = defaultdict(float)
        for share, _, tokens in self.step(text, draft_lens[0]):
            if len(tokens) >= length:
                law[tokens[:length]] += share
                continue
            rest = self._rest(tuple(draft_lens[1:]), length - len(tokens), (*text, *tokens))
            for more, part in rest.items():
                law[(*tokens, *more)] += share * part
        return law

    def mean_accepted(self, draft_len: int) -> float:
        return sum(share * length for share, length, _ in self.step((), draft_len))

    @functools.cache  # noqa: B019  chains live as long as their test
    def _rest(self, draft_lens: tuple[int, ...], length: int, text: Text) -> Mapping[Text, float]:
        return self.emitted(draft_lens, length, text)

    def _cases(self, text: Text, draft_len: int, cap: int) -> Iterator["_Case"]:
        for drafts in itertools.product(range(self.vocab_size), repeat=draft_len):
            texts = [(*text, *drafts[:k]) for k in range(draft_len + 1)]
            target_probs = np.array([self.target(one) for one in texts])
            draft_probs = np.array([self._draft_law(one) for one in texts[:-1]]).reshape(draft_len, self.vocab_size)
            share = float(np.prod([draft_probs[k, token] for k, token in enumerate(drafts)], dtype=np.float64))
            if share == 0:
                continue
            edges = thresholds(target_probs, draft_probs, drafts, cap, is_block=self.is_block)
            for is_below in itertools.product((True, False), repeat=draft_len):
                parts = [edge if below else 1 - edge for edge, below in zip(edges, is_below, strict=True)]
                if min(parts, default=1) > 1e-12:
                    intervals = [_ends(edge, below) for edge, below in zip(edges, is_below, strict=True)]
                    coins = ([low for low, _ in intervals], [high for _, high in intervals])
                    yield _Case(share * float(np.prod(parts)), drafts, target_probs, draft_probs, coins)

    def _draft_law(self, text: Text) -> Float[np.ndarray, " V"]:
        probs_V = self.drafter(text)
        return np.eye(self.vocab_size, dtype=np.float32)[int(probs_V.argmax())] if self.is_one_hot else probs_V


@dataclass(frozen=True)
class _Case:
    probability: float
    drafts: Text
    target_probs: Float[np.ndarray, "W V"]
    draft_probs: Float[np.ndarray, "K V"]
    coins: tuple[list[float], list[float]]


def thresholds(
    target_probs: Float[np.ndarray, "W V"],
    draft_probs: Float[np.ndarray, "K V"],
    drafts: Text,
    cap: int,
    *,
    is_block: bool,
) -> list[float]:
    """Below which coin each draft of the chain stands (as a block: the prefix that ends with it), in float64."""
    p_WV, q_KV = target_probs.astype(np.float64), draft_probs.astype(np.float64)
    ratios = [p_WV[k, token] / q_KV[k, token] for k, token in enumerate(drafts)]
    if not is_block:
        return [min(ratio, 1.0) if k < cap else 0.0 for k, ratio in enumerate(ratios)]
    edges, reach = [], 1.0
    for k, ratio in enumerate(ratios, start=1):
        reach = min(reach * ratio, 1.0)
        if k == cap:
            edges.append(reach)
        elif k > cap:
            edges.append(0.0)
        else:
            room = np.maximum(reach * p_WV[k] - q_KV[k], 0).sum()
            edges.append(float(room / (room + 1 - reach)) if room + 1 - reach > 0 else 1.0)
    return edges


def _ends(edge: float, is_below: bool) -> tuple[float, float]:
    """The first and last coin of the interval below or above `edge`, but for what float32 may round across."""
    if is_below:
        return 0.0, ALMOST_ONE if edge >= 1 else edge * (1 - 1e-5)
    return min(edge * (1 + 1e-5), ALMOST_ONE), ALMOST_ONE


def _stacked(arrays: Sequence[np.ndarray]) -> jax.Array:
    return jnp.array(np.stack(arrays), jnp.float32)


@functools.lru_cache(maxsize=64)
def jitted(judge: Judge) -> Any:
    return jax.jit(judge)


# ---- draws

Draft = Callable[[SlotView, int], Drafts]
"""Drafts for slots that begin with their pending token, as many as the number says."""


@dataclass(frozen=True, eq=False)
class Bench:
    """Many slots that decode by a table of logits, by the last token alone: a rule and drafts, and no engine.

    `draft` proposes; by default a chain that is drawn one by one from `drafter_VV`, as `draft_sampling` says. `caps`
    are those of the slots, in turns.
    """

    rule: AcceptanceRule
    target_VV: Float[np.ndarray, "V V"]
    drafter_VV: Float[np.ndarray, "V V"]
    params: SamplingParams
    draft_sampling: DraftSampling = "probabilistic"
    num_slots: int = 25_000
    draft: Draft | None = None
    prompt: Text = (0,)
    caps: tuple[int, ...] = ()

    def run(self, draft_lens: Sequence[int], *, num_rounds: int = 8) -> Int[np.ndarray, "N L"]:
        """Tokens 1 .. len(draft_lens) after the prompt, of `num_slots * num_rounds` texts."""
        rounds, num_known = [], len(self.prompt)
        prompt = jnp.array(self.prompt, jnp.int32)
        for number in range(num_rounds):
            sampling = self._sampling(range(number * self.num_slots, (number + 1) * self.num_slots))
            text = jnp.zeros((self.num_slots, num_known + len(draft_lens)), jnp.int32).at[:, :num_known].set(prompt)
            length, pending = jnp.full((self.num_slots,), num_known - 1, jnp.int32), text[:, num_known - 1]
            for draft_len in draft_lens:
                cap = self._cap(draft_len)
                length, pending, text, _ = self._step(draft_len)(sampling, length, pending, text, cap)
            rounds.append(np.asarray(text)[:, num_known:])
        return np.concatenate(rounds)

    def verdict(self, draft_len: int, *, seeds: Sequence[int] = (), draft_cap: Any = None) -> Accepted:
        """Of the first step of `num_slots` texts of one token."""
        sampling = self._sampling(seeds or range(self.num_slots))
        zero = jnp.zeros((self.num_slots,), jnp.int32)
        cap = self._cap(draft_len) if draft_cap is None else draft_cap
        return jax.device_get(self._step(draft_len)(sampling, zero, zero, zero[:, None], cap)[3])

    def _sampling(self, seeds: Sequence[int]) -> SamplingRows:
        one = sampling_rows(self.params, prompt_lens=[len(self.prompt)])
        every = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_slots, *x.shape[1:])), one)
        return replace(every, key_B2=jnp.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], jnp.uint32))

    def _cap(self, draft_len: int) -> Int[Array, " B"]:
        caps = np.minimum(np.array(self.caps or (draft_len,), np.int32), draft_len)
        return jnp.array(np.resize(caps, self.num_slots))

    def _chain(self, slots: SlotView, draft_len: int) -> Drafts:
        drafter_VV = jnp.array(self.drafter_VV, jnp.float32)
        drafts, last = Drafts(jnp.zeros((self.num_slots, 0), jnp.int32)), slots.pending_token
        for _ in range(draft_len):
            drafts = with_next_draft(drafts, drafter_VV[last][:, None], slots, self.draft_sampling, NO_PARALLEL)
            last = drafts.tokens_BK[:, -1]
        return drafts

    @functools.cache  # noqa: B019  benches live as long as their test
    def _step(self, draft_len: int) -> Any:
        vocab_size = len(self.target_VV)
        target_VV = jnp.array(self.target_VV, jnp.float32)

        def step(sampling: Any, length: Any, pending: Any, text: Any, draft_cap: Any) -> Any:
            slots = slot_view(
                sampling,
                vocab_size=vocab_size,
                draft_len=draft_len,
                committed_len=length,
                pending_token=pending,
                draft_cap=draft_cap,
                history_BS=text,
            )
            drafts = (self.draft or self._chain)(slots, draft_len)
            if drafts.num_proposed is not None:
                slots = replace(slots, draft_cap=jnp.minimum(slots.draft_cap, drafts.num_proposed))
            logits_BWV = target_VV[jnp.concatenate([pending[:, None], drafts.tokens_BK], axis=1)]
            accepted = self.rule.accept(drafts, logits_BWV, slots, NO_PARALLEL)
            column = jnp.arange(draft_len + 1)[None, :]
            position = jnp.where(column <= accepted.num_accepted[:, None], length[:, None] + 1 + column, text.shape[1])
            slot = jnp.arange(self.num_slots)
            text = text.at[slot[:, None], position].set(accepted.tokens_BE, mode="drop")
            last = accepted.tokens_BE[slot, accepted.num_accepted]
            return length + 1 + accepted.num_accepted, last, text, accepted

        return jax.jit(step)


def logits(vocab_size: int, seed: int) -> Float[np.ndarray, "V V"]:
    """Of the token after each token."""
    return np.random.default_rng(seed).normal(size=(vocab_size, vocab_size)).astype(np.float32) * 1.5


def reversed_law(logits_VV: Float[np.ndarray, "V V"]) -> Float[np.ndarray, "V V"]:
    """The target's likeliest token is the drafter's unlikeliest, and so on."""
    order = np.argsort(logits_VV, axis=1)
    reverse = np.empty_like(logits_VV)
    np.put_along_axis(reverse, order, np.sort(logits_VV, axis=1)[:, ::-1], axis=1)
    return reverse


def requested_law(one: Bench) -> Law:
    """Of the token after a text, with all that the request asks for written out (`mtp_jax.testing.oracle`)."""
    request = Request("", one.prompt, one.params, seed=0)

    def law(text: Text) -> Float[np.ndarray, " V"]:
        edited_V = edited_logits(one.target_VV[text[-1]], request, text)
        weights_V = np.exp(filtered_logits(edited_V, one.params).astype(np.float64))
        return weights_V / weights_V.sum()

    return law


def surprise_of_texts(one: Bench, draft_lens: Sequence[int], *, length: int = 3, num_rounds: int = 2) -> float:
    """Of the first `length` tokens, jointly."""
    size = len(one.target_VV)
    tokens = one.run(draft_lens, num_rounds=num_rounds)[:, :length]
    probs = np.zeros((size,) * length)
    for text, share in joint_law(requested_law(one), length, one.prompt).items():
        probs[text] = share
    cells = np.ravel_multi_index(tuple(tokens.T), probs.shape)
    return surprise_of(np.bincount(cells, minlength=probs.size), probs.reshape(-1))


def surprise_of(counts: Int[np.ndarray, " X"], probs: Float[np.ndarray, " X"]) -> float:
    """Chi-square less its degrees of freedom, in standard deviations; cells of an expectation below 5 are one cell."""
    expected = probs / probs.sum() * counts.sum()
    is_small = expected < 5
    assert not counts[probs == 0].any(), "a token without probability was drawn"
    cells = [(counts[~is_small], expected[~is_small])]
    if expected[is_small].sum() >= 5:
        cells.append((counts[is_small].sum(keepdims=True), expected[is_small].sum(keepdims=True)))
    chi_square = sum(float(((found - wanted) ** 2 / wanted).sum()) for found, wanted in cells)
    degrees = sum(len(found) for found, _ in cells) - 1
    return (chi_square - degrees) / np.sqrt(2 * degrees)
