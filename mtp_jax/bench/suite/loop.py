"""One engine under a steady load: a batch of requests that decode together, timed step by step."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.bench.suite.models import SuiteModel
from mtp_jax.bench.suite.trace import Profile, profiled
from mtp_jax.core.config import CacheConfig, EngineConfig, SamplingParams, SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.core.shapes import ShapeGrid
from mtp_jax.engine.decisions import LaunchDecision
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.launch import Launcher
from mtp_jax.engine.readback import Launch
from mtp_jax.engine.requests import Request
from mtp_jax.models.api import Weights
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.shortlist import with_shortlist

_PAUSE_S = 0.03
_PLAIN = SpeculativeConfig(method=None)


@dataclass(frozen=True)
class Load:
    """How long to measure: rounds of `steps` steps after `warm_steps`; then as many again under the profiler, once."""

    rounds: int = 3
    steps: int = 40
    warm_steps: int = 8
    profiled_steps: int = 16

    @property
    def num_steps(self) -> int:
        """In all."""
        return self.rounds * self.steps + self.warm_steps + self.profiled_steps


@dataclass(frozen=True)
class Backends:
    """How an engine runs: names of its kernels, the numbers' type, and what the host does ahead."""

    attention: str
    moe: str = "reference"
    linear: str = "xla"
    greedy_programs: bool = True
    readback_depth: int = 2
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Steady:
    """What one batch size measured. Times are of one step, by the host's clock, many in a row."""

    batch_size: int
    draft_len: int
    ms_per_step: float
    ms_of_rounds: tuple[float, ...]
    tokens_per_slot: float  # a step
    context: float  # positions a slot had, on average
    dispatch_ms: float  # of the step, the host's call of the program and the start of the copy back
    prefill_s: float  # until every request had its first token
    tokens: tuple[tuple[int, ...], ...] = field(repr=False)  # emitted, by request
    profile: Profile | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of all slots."""
        return self.batch_size * self.tokens_per_slot / self.ms_per_step * 1000

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "batch_size": self.batch_size,
            "draft_len": self.draft_len,
            "ms_per_step": round(self.ms_per_step, 4),
            "ms_of_rounds": [round(ms, 4) for ms in self.ms_of_rounds],
            "tokens_per_slot": round(self.tokens_per_slot, 4),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "context": round(self.context, 1),
            "dispatch_ms": round(self.dispatch_ms, 4),
            "prefill_s": round(self.prefill_s, 3),
            "profile": None if self.profile is None else self.profile.as_dict(),
        }


def suite_engine(
    model: SuiteModel,
    family: MtpDecoder,
    weights: Weights,
    backends: Backends,
    *,
    speculative: SpeculativeConfig | None,
    batch_sizes: Sequence[int],
    load: Load,
    all_draft_lens: bool = False,
) -> Engine:
    """An engine with programs for these batch sizes alone, each with Kmax drafts, or with every number up to it."""
    speculative = _PLAIN if speculative is None else speculative
    longest = speculative.num_speculative_tokens
    size = speculative.draft_vocab_size
    if size is not None:
        weights = with_shortlist(family, weights, range(family.vocab_size), size)
    max_batch = max(batch_sizes)
    num_tokens = (load.num_steps + 8) * (longest + 1)
    config = EngineConfig(
        max_model_len=_pages(model.context + num_tokens, model.page_size) * model.page_size,
        max_num_seqs=max_batch,
        cache=CacheConfig(page_size=model.page_size, prefix_caching=False),
        speculative=speculative,
        attention_backend=backends.attention,
        moe_backend=backends.moe,
        linear_backend=backends.linear,
        greedy_programs=backends.greedy_programs,
        readback_depth=backends.readback_depth,
        prefill_chunk=model.prefill_chunk,
    )
    if config.max_model_len > family.max_position_embeddings:
        raise ConfigError(
            f"so many steps need {config.max_model_len} positions; {model.name} has {family.max_position_embeddings}."
        )
    grid = ShapeGrid(
        tuple(sorted({1, *batch_sizes})),
        longest,
        (model.prefill_chunk,),
        min_draft_len=0 if all_draft_lens else longest,
    )
    return Engine(family, weights, config, dtype=jnp.dtype(backends.dtype), grid=grid)


def _pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def measure(engine: Engine, model: SuiteModel, batch_size: int, load: Load) -> Steady:
    """`batch_size` requests of `model.context` random tokens, greedy, timed while all of them decode."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(batch_size)}
    config = engine.config
    params = SamplingParams(temperature=0, max_tokens=config.max_model_len - model.context, ignore_eos=True)
    rng = np.random.default_rng(0)
    for request_id in tokens:
        prompt = tuple(rng.integers(1, engine.family.vocab_size, model.context).tolist())
        engine.submit(Request(request_id, prompt, params, seed=int(request_id), eos_token_ids=()))

    def step() -> None:
        for progress in engine.step():
            if progress.error is not None:
                raise ConfigError(progress.error)
            tokens[progress.request_id] += progress.new_tokens

    start = time.perf_counter()
    engine.group.prefills_first = True
    while not all(tokens.values()):
        step()
    engine.group.prefills_first = False
    prefill_s = time.perf_counter() - start
    for _ in range(load.warm_steps):
        step()
    launcher = _TimedLauncher(engine.launcher)
    engine.launcher = launcher
    rounds: list[tuple[float, int]] = []
    contexts: list[float] = []
    for _ in range(load.rounds):
        num_before = sum(map(len, tokens.values()))
        start = time.perf_counter()
        for _ in range(load.steps):
            step()
        seconds = time.perf_counter() - start
        rounds.append((1000 * seconds / load.steps, sum(map(len, tokens.values())) - num_before))
        contexts.append(statistics.fmean(slot.known_len for slot in engine.scheduler.slots))
    engine.launcher = launcher.inner
    seen = {request_id: tuple(found) for request_id, found in tokens.items()}

    def run_steps() -> None:
        time.sleep(_PAUSE_S)  # what was launched before the profile began must not be in it, what is launched must
        for _ in range(load.profiled_steps):
            step()
        time.sleep(_PAUSE_S)

    profile = profiled(run_steps, load.profiled_steps) if load.profiled_steps else None
    for request_id in tokens:
        engine.cancel(request_id)
    engine.drain()
    return Steady(
        batch_size=batch_size,
        draft_len=config.max_draft_len,
        ms_per_step=statistics.median(ms for ms, _ in rounds),
        ms_of_rounds=tuple(ms for ms, _ in rounds),
        tokens_per_slot=sum(count for _, count in rounds) / (load.rounds * load.steps * batch_size),
        context=statistics.fmean(contexts),
        dispatch_ms=1000 * statistics.median(launcher.seconds),
        prefill_s=prefill_s,
        tokens=tuple(seen[str(index)] for index in range(batch_size)),
        profile=profile,
    )


class _TimedLauncher(Launcher):
    """A launcher that notes how long each launch keeps the host."""

    def __init__(self, inner: Launcher) -> None:
        self.inner = inner
        self.seconds: list[float] = []

    def launch(self, decision: LaunchDecision, inputs: jax.Array) -> Launch:
        start = time.perf_counter()
        launch = self.inner.launch(decision, inputs)
        self.seconds.append(time.perf_counter() - start)
        return launch


def without_profile(load: Load) -> Load:
    """The same load, measured without the profiler."""
    return replace(load, profiled_steps=0)
