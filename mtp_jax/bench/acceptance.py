"""How often drafts stand, by the way they are drawn and judged, against what the two laws say exactly.

First drafts only: with one draft a step, the text before each step fixes the target's law p and the drafter's q of the
token to come, and with them the probability that the draft stands:

- argmax drafts, `match`: p(x) at x = argmax q
- coupled drafts, `match`: the sum over x of 1 / sum over y of max(p(y) / p(x), q(y) / q(x)) (Daliri, Musco, Suresh,
  arXiv 2408.07978)
- drawn drafts, `rejection`: the sum over x of min(p(x), q(x))

p and q are those of one teacher-forced pass over the text that the engine wrote, which shares no cache, no page and no
step with it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mtp_jax.bench.tables import table
from mtp_jax.core.config import SamplingParams
from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.requests import Request, RequestState
from mtp_jax.jobs import derived_seed
from mtp_jax.llm import LLM
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.policies.schedule import ScheduledDraftLen
from mtp_jax.train.loss import predict

Probs = Float[np.ndarray, " V"]


@dataclass(frozen=True)
class Way:
    """A way to draw and judge drafts: the fields of its `SpeculativeConfig`, and how likely its first draft stands."""

    name: str
    speculative: Mapping[str, Any]
    expected: Callable[[Probs, Probs], float]


@dataclass(frozen=True)
class Measured:
    """One way at one temperature. `sigma`: the difference in standard deviations of the measured share."""

    way: str
    temperature: float
    num_steps: int
    kept: float
    expected: float
    sigma: float
    tokens_per_step: float  # at the longest draft length

    def as_row(self) -> list[str]:
        """For a table under `HEAD`."""
        return [
            self.way,
            f"{self.temperature:g}",
            str(self.num_steps),
            f"{self.kept:.4f}",
            f"{self.expected:.4f}",
            f"{self.sigma:+.1f}",
            f"{self.tokens_per_step:.2f}",
        ]


_MEASURED_WITH = frozenset({"temperature", "max_tokens", "seed", "ignore_eos"})
"""Of `SamplingParams`: what a measurement may set."""
HEAD = ["drafts, rule", "temperature", "steps", "kept", "exact", "sigma", "tokens/step"]


def argmax_share(p_V: Probs, q_V: Probs) -> float:
    """Probability that the drafter's likeliest token is drawn from p.

    >>> argmax_share(np.array([0.3, 0.7]), np.array([0.6, 0.4]))
    0.3
    """
    return float(p_V[q_V.argmax()])


def drawn_share(p_V: Probs, q_V: Probs) -> float:
    """Probability that a draft drawn from q stands under rejection sampling.

    >>> drawn_share(np.array([0.5, 0.5]), np.array([0.75, 0.25]))
    0.75
    """
    return float(np.minimum(p_V, q_V).sum())


def coupled_share(p_V: Probs, q_V: Probs) -> float:
    """Probability that draws from p and q with the same Gumbel noise are equal.

    The larger of p(y) / p(x) and q(y) / q(x) is the first where p / q is larger at y than at x: in that order the sum
    over y is two running sums.

    >>> coupled_share(np.array([0.5, 0.5]), np.array([0.75, 0.25]))
    0.75
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_V = np.where(p_V > 0, p_V / q_V, 0.0)
    order_V = np.argsort(ratio_V, kind="stable")
    p_V, q_V = p_V[order_V], q_V[order_V]
    from_here_V = np.cumsum(p_V[::-1])[::-1]  # p of what lies at or above in ratio
    before_V = np.cumsum(q_V) - q_V
    is_possible_V = (p_V > 0) & (q_V > 0)
    p_V, q_V = p_V[is_possible_V], q_V[is_possible_V]
    return float((1 / (from_here_V[is_possible_V] / p_V + before_V[is_possible_V] / q_V)).sum())


WAYS = (
    Way("argmax, match", {"draft_sampling": "greedy"}, argmax_share),
    Way("coupled, match", {"draft_sampling": "coupled"}, coupled_share),
    Way("argmax, rejection", {"acceptance": "rejection", "draft_sampling": "greedy"}, argmax_share),
    Way("drawn, rejection", {"acceptance": "rejection"}, drawn_share),
    Way("drawn, rejection by block", {"acceptance": "rejection", "block_verification": True}, drawn_share),
)


def measure(
    llm: LLM, way: Way, weights: Weights, prompts: Sequence[tuple[int, ...]], params: SamplingParams
) -> Measured:
    """Serves the prompts twice, with one draft a step and with as many as there may be; `params.temperature` counts.

    Raises `ConfigError` for a request that is refused, and for what changes the laws besides: they are taken at the
    temperature alone.
    """
    usual = SamplingParams()
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name not in _MEASURED_WITH and value != getattr(usual, field.name):
            raise ConfigError(
                f"{field.name} is {value!r}, and bench acceptance compares laws at a temperature alone; leave it out."
            )
    states = _serve(llm, prompts, params, 1)
    steps = list(_first_drafts(llm.family, weights, states, params.temperature))
    shares = np.array([way.expected(p_V, q_V) for p_V, q_V, _ in steps])
    num_kept = sum(is_kept for _, _, is_kept in steps)
    deviation = float(np.sqrt((shares * (1 - shares)).sum()))
    difference = float(num_kept - shares.sum())
    longest = _serve(llm, prompts, params, llm.engine.config.max_draft_len)
    num_longest = sum(state.metrics.num_steps for state in longest)
    return Measured(
        way=way.name,
        temperature=params.temperature,
        num_steps=len(steps),
        kept=num_kept / len(steps),
        expected=float(shares.mean()),
        sigma=difference / deviation if deviation > 1e-6 else difference,
        tokens_per_step=1 + sum(state.metrics.num_accepted_tokens for state in longest) / num_longest,
    )


def as_text(results: Sequence[Measured]) -> str:
    """A table for people."""
    return table([HEAD, *(result.as_row() for result in results)])


def json_line(results: Sequence[Measured], facts: Mapping[str, Any]) -> str:
    """Everything in one line."""
    return json.dumps({"bench": "acceptance", **facts, "results": [asdict(result) for result in results]})


def _serve(llm: LLM, prompts: Sequence[tuple[int, ...]], params: SamplingParams, draft_len: int) -> list[RequestState]:
    scheduler, states = llm.engine.scheduler, {}
    own, scheduler.policy = scheduler.policy, ScheduledDraftLen(((len(prompts), draft_len),))
    try:
        for index, prompt in enumerate(prompts):
            seed = derived_seed(params.seed or 0, index)
            llm.engine.submit(
                Request(str(index), prompt, params, seed, eos_token_ids=llm.family.eos_token_ids, wants_trace=True)
            )
        for progress in llm.engine.run():
            if progress.error is not None:
                raise ConfigError(progress.error)
            states[progress.request_id] = progress.state
    finally:
        scheduler.policy = own
    return [states[str(index)] for index in range(len(prompts))]


def _first_drafts(
    family: ModelFamily, weights: Weights, states: Sequence[RequestState], temperature: float
) -> Iterator[tuple[Probs, Probs, bool]]:
    """(target's law, drafter's law, whether the draft was kept) of each step that drafted.

    With the pending token at position c the draft is of position c + 1: row c of the target, row c - 1 of the drafter.
    """
    longest = max(len(state.request.prompt) + len(state.tokens) for state in states)
    for state in states:
        text = [*state.request.prompt, *state.tokens]
        padded = np.zeros((1, longest + 2), np.int32)
        padded[0, : len(text)] = text
        target_SV, draft_SV = jax.device_get(_predictor(family)(weights, jnp.asarray(padded)))
        for record in state.records:
            position = record.committed_len_before
            if record.drafts:
                p_V, q_V = _law(target_SV[position], temperature), _law(draft_SV[position - 1], temperature)
                yield p_V, q_V, record.num_accepted > 0


def _law(logits_V: Float[np.ndarray, " V"], temperature: float) -> Probs:
    if temperature == 0:
        return np.eye(1, len(logits_V), int(logits_V.argmax()))[0]
    weights_V = np.exp((logits_V.astype(np.float64) - logits_V.max()) / temperature)
    return weights_V / weights_V.sum()


@lru_cache(maxsize=2)
def _predictor(family: ModelFamily) -> Callable[[Weights, Int[Array, "B T"]], tuple[Array, Array]]:
    def first_drafts(weights: Weights, tokens_BT: Array) -> tuple[Array, Array]:
        predictions = predict(family, weights, tokens_BT, 1)
        return predictions.target_BSV[0], predictions.drafts[0][0]

    return jax.jit(first_drafts)
