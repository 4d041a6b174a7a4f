"""`goodput` against every fixed draft length while a batch drains and while one fills."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtp_jax.bench.drain import unequal_lengths
from mtp_jax.bench.suite.setting import DRAFT_LEN, Findings, Loaded, Row, Setting, forced_acceptance
from mtp_jax.core.config import SamplingParams, SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.requests import Request
from mtp_jax.policies.api import DraftLenPolicy
from mtp_jax.policies.registry import policy_of
from mtp_jax.policies.schedule import ScheduledDraftLen

GOODPUT = "goodput"


def goodput(setting: Setting, findings: Findings, dense: Loaded) -> dict[str, Any]:
    """Tokens a second of a drain (all requests at once, of unequal length) and of a ramp (one after the other)."""
    num_requests = max(setting.batch_sizes)
    speculative = SpeculativeConfig(
        num_speculative_tokens=DRAFT_LEN,
        policy="goodput",
        synthetic_acceptance=forced_acceptance(DRAFT_LEN),
    )
    engine = setting.engine(dense, speculative, _buckets(num_requests), all_draft_lens=True)
    fixed = {f"K={k}": ScheduledDraftLen(((num_requests, k),)) for k in range(DRAFT_LEN + 1)}
    learnt: DraftLenPolicy = policy_of(speculative, engine.step_costs)
    lengths = unequal_lengths(num_requests, 8 if setting.is_tiny else 256)
    results: dict[str, Any] = {}
    for load, steps_apart in (("drain", 0), ("ramp", 1 if setting.is_tiny else 4)):
        speeds: dict[str, list[float]] = {name: [] for name in (*fixed, GOODPUT)}
        for _ in range(1 if setting.is_tiny else 2):
            for name, policy in fixed.items():
                speeds[name].append(_serve(engine, dense, lengths, policy, steps_apart)[0])
            speed, learnt = _serve(engine, dense, lengths, learnt, steps_apart)
            speeds[GOODPUT].append(speed)
        found = {name: statistics.median(runs) for name, runs in speeds.items()}
        best = max(fixed, key=found.__getitem__)
        against = f"{found[GOODPUT] / found[best]:.3f}x {best}, {found[GOODPUT] / found['K=0']:.3f}x K=0"
        findings.rows.append(Row(f"{GOODPUT}, {load}", num_requests, tokens_per_s=found[GOODPUT], note=against))
        results[load] = {"tokens_per_s": {name: round(speed, 1) for name, speed in found.items()}, "best_fixed": best}
    costs = {f"slots={slots},K={k}": round(1000 * cost, 4) for (slots, k), cost in engine.step_costs.items()}
    return {**results, "step_cost_ms": costs}


def _buckets(num_requests: int) -> Sequence[int]:
    return sorted({1, *(size for size in (8, 16, 32) if size < num_requests), num_requests})


def _serve(
    engine: Engine, loaded: Loaded, lengths: Sequence[int], policy: DraftLenPolicy, steps_apart: int
) -> tuple[float, DraftLenPolicy]:
    """(tokens a second, the policy with what it has learnt). With 0 steps apart timing starts when all have a token."""
    rng = np.random.default_rng(0)
    scheduler = engine.scheduler
    own, scheduler.policy = scheduler.policy, policy
    waiting = [
        Request(
            str(index),
            tuple(rng.integers(1, engine.family.vocab_size, loaded.model.context).tolist()),
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True),
            seed=index,
            eos_token_ids=(),
        )
        for index, length in enumerate(lengths)
    ]
    waiting.reverse()
    seen: set[str] = set()
    num_tokens, num_steps = 0, 0
    engine.group.prefills_first = not steps_apart
    start = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and num_steps >= steps_apart * (len(lengths) - len(waiting)):
            engine.submit(waiting.pop())
        for progress in engine.step():
            if progress.error is not None:
                raise ConfigError(progress.error)
            num_tokens += len(progress.new_tokens)
            seen.add(progress.request_id)
        num_steps += 1
        if not steps_apart and engine.group.prefills_first and len(seen) == len(lengths):
            engine.group.prefills_first = False
            num_tokens, start = 0, time.perf_counter()
    seconds = time.perf_counter() - start
    engine.drain()
    learnt, scheduler.policy = scheduler.policy, own
    return num_tokens / seconds, learnt
