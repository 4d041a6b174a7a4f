"""Tokens a second of a mesh against one device that has as many slots as each of its data shards."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_jax.core.config import SamplingParams
from mtp_jax.llm import LLM

_PROMPT_LEN = 32


@dataclass(frozen=True)
class Pass:
    """One pass over the requests."""

    seconds: float
    num_tokens: int
    num_launches: int

    @property
    def tokens_per_s(self) -> float:
        """Emitted, prompts included in the time."""
        return self.num_tokens / self.seconds

    @property
    def ms_per_launch(self) -> float:
        """Mean over decode steps and prefills."""
        return 1000 * self.seconds / self.num_launches


@dataclass(frozen=True)
class Scaling:
    """Passes by engine, in turns: the i-th ones ran one after the other."""

    alone: Sequence[Pass]
    on_mesh: Sequence[Pass]

    @property
    def ratios(self) -> tuple[float, ...]:
        """The mesh's tokens a second over the single device's, by round."""
        pairs = zip(self.alone, self.on_mesh, strict=True)
        return tuple(mesh.tokens_per_s / alone.tokens_per_s for alone, mesh in pairs)

    def as_text(self) -> str:
        """For people."""
        lines = [_line(name, passes) for name, passes in (("one device", self.alone), ("mesh", self.on_mesh))]
        ratios = self.ratios
        lines.append(f"mesh over one device: {statistics.median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]")
        return "\n".join(lines)

    def as_dict(self) -> Mapping[str, object]:
        """What the JSON line says."""
        return {
            "ratios": [round(ratio, 4) for ratio in self.ratios],
            **{
                name: {
                    "tokens_per_s": [round(one.tokens_per_s, 1) for one in passes],
                    "ms_per_launch": [round(one.ms_per_launch, 3) for one in passes],
                }
                for name, passes in (("alone", self.alone), ("on_mesh", self.on_mesh))
            },
        }


def scaling(alone: LLM, on_mesh: LLM, *, num_requests: int, num_tokens: int, rounds: int) -> Scaling:
    """Serves the same random prompts on both, in turns, `rounds` times after one that does not count."""
    rng = np.random.default_rng(0)
    prompts = [[int(t) for t in rng.integers(0, alone.family.vocab_size, _PROMPT_LEN)] for _ in range(num_requests)]
    passes: tuple[list[Pass], list[Pass]] = ([], [])
    for number in range(rounds + 1):
        ways = list(zip((alone, on_mesh), passes, strict=True))
        for llm, found in reversed(ways) if number % 2 else ways:
            found.append(_pass(llm, prompts, num_tokens))
    return Scaling(passes[0][1:], passes[1][1:])


def _pass(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> Pass:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    launches_before, start = llm.engine.group.num_launches, time.perf_counter()
    outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return Pass(
        seconds=seconds,
        num_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        num_launches=llm.engine.group.num_launches - launches_before,
    )


def _line(name: str, passes: Sequence[Pass]) -> str:
    speeds = [one.tokens_per_s for one in passes]
    return (
        f"{name}: {statistics.median(speeds):.0f} tokens/s [{min(speeds):.0f}, {max(speeds):.0f}], "
        f"{statistics.median(one.ms_per_launch for one in passes):.2f} ms a launch"
    )
