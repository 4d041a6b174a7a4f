"""A mesh against one device: equal tokens for requests near their limits, what the vote costs a step, and speed."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtp_jax.bench.scaling import Scaling
from mtp_jax.bench.vote_cost import VoteCost
from mtp_jax.core.config import SamplingParams
from mtp_jax.llm import LLM
from mtp_jax.outputs import RequestOutput


@dataclass(frozen=True)
class FirstDifference:
    """Where a request's tokens part, and by how much one device's best token led the second there (log-probability).

    A margin near the rounding of the arithmetic is a tie, which another order of additions may break either way.
    """

    request: int
    position: int
    margin: float


@dataclass(frozen=True)
class MeshBench:
    """Results of one mesh."""

    mesh: Mapping[str, int]
    num_requests: int
    num_tokens: int
    differences: Sequence[FirstDifference]
    votes: Sequence[VoteCost]
    scaling: Scaling | None = None

    def as_text(self) -> str:
        """For people."""
        lines = [
            f"mesh {dict(self.mesh)}: {self.num_requests} requests, {self.num_tokens} tokens, "
            f"{self.num_requests - len(self.differences)} requests equal to one device's"
        ]
        lines += [
            f"  request {one.request} first differs at token {one.position}, where the best token led by "
            f"{one.margin:.2e} in log-probability"
            for one in self.differences
        ]
        return "\n".join([*lines, *([] if self.scaling is None else [self.scaling.as_text()])])

    def json_line(self, facts: Mapping[str, Any]) -> str:
        """Every figure in one line."""
        scaling = None if self.scaling is None else self.scaling.as_dict()
        return json.dumps({"bench": "mesh", **facts, **dataclasses.asdict(self), "scaling": scaling})


def near_limit_prompts(vocab_size: int, max_model_len: int, count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts that end 1 to 16 tokens before `max_model_len`, every eighth of them far from it."""
    rng = np.random.default_rng(seed)
    lengths = [
        int(rng.integers(8, max_model_len // 2)) if i % 8 == 7 else max_model_len - 1 - int(rng.integers(0, 16))
        for i in range(count)
    ]
    return [[int(token) for token in rng.integers(0, vocab_size, length)] for length in lengths]


def serve(llm: LLM, prompts: Sequence[Sequence[int]], temperature: float) -> list[RequestOutput]:
    """Every prompt to its limit, with the two likeliest tokens of each position."""
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=48, ignore_eos=True, logprobs=2)
        for i in range(len(prompts))
    ]
    return llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)


def first_differences(alone: Sequence[RequestOutput], on_mesh: Sequence[RequestOutput]) -> list[FirstDifference]:
    """One for each request whose tokens are not those of one device."""
    found: list[FirstDifference] = []
    for index, (left, right) in enumerate(zip(alone, on_mesh, strict=True)):
        tokens, others = left.outputs[0].token_ids, right.outputs[0].token_ids
        position = next((i for i, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]), None)
        if position is not None:
            listed = left.outputs[0].logprobs
            assert listed is not None
            best, second = sorted((entry.logprob for entry in listed[position].values()), reverse=True)[:2]
            found.append(FirstDifference(index, position, best - second))
    return found
