"""Parts that time an engine's step: the ceilings, plain decoding, speculation, the expert model."""

import gc
from typing import Any

from mtp_jax.bench.equality import first_difference
from mtp_jax.bench.suite.ceilings import copy_rate, dispatch_us
from mtp_jax.bench.suite.loop import Steady, measure
from mtp_jax.bench.suite.setting import DRAFT_LEN, Findings, Loaded, Row, Setting, forced_acceptance
from mtp_jax.core.speculative import SpeculativeConfig
from mtp_jax.engine.engine import Engine

_LEAVES = ((2, 2), (100, 36), (160, 40))


def ceilings(setting: Setting, findings: Findings) -> dict[str, Any]:
    """Copy bandwidth, and what a call costs the host by the number of its arguments (kept and donated)."""
    findings.copy_rate = copy_rate(setting.copy_bytes)
    dispatch = {f"{kept}+{donated}": dispatch_us(kept, donated) for kept, donated in _LEAVES}
    copied = f"{findings.copy_rate / 1e12:.2f} TB/s"
    cost = ", ".join(f"{name} {us['dispatch']:.0f} us" for name, us in dispatch.items())
    findings.rows.append(Row("device copy, read and written", note=copied))
    findings.rows.append(Row("dispatch by arguments, kept+donated", note=cost))
    return {"copy_tb_s": findings.copy_rate / 1e12, "dispatch_us": dispatch}


def plain(setting: Setting, findings: Findings, dense: Loaded) -> dict[str, Any]:
    """Plain decoding: a program without a drafter."""
    engine = setting.engine(dense, None)
    found = [measure(engine, dense.model, size, setting.load) for size in setting.batch_sizes]
    for steady in found:
        findings.plain_tokens_per_s[steady.batch_size] = steady.tokens_per_s
        floor_ms = findings.floor_ms(dense.floor.plain_bytes(steady.batch_size, steady.context))
        findings.rows.append(_row("plain", steady, floor_ms))
    return {"steps": [steady.as_dict() for steady in found], **_start(engine)}


def speculative(setting: Setting, findings: Findings, dense: Loaded) -> dict[str, Any]:
    """K drafts of one MTP layer over the whole head and over a shortlist, kept at a forced rate."""
    results: dict[str, Any] = {}
    for name, head_size in (("full head", None), ("shortlist", dense.model.draft_vocab_size)):
        engine = _drafting(setting, dense, DRAFT_LEN, head_size)
        found = [measure(engine, dense.model, size, setting.load) for size in setting.batch_sizes]
        for steady in found:
            num_bytes = dense.floor.step_bytes(steady.batch_size, steady.context, DRAFT_LEN, head_size)
            row = _row(f"K={DRAFT_LEN}, {name}", steady, findings.floor_ms(num_bytes), findings)
            findings.rows.append(row)
            best = findings.best_tokens_per_s.get(steady.batch_size, 0.0)
            findings.best_tokens_per_s[steady.batch_size] = max(best, steady.tokens_per_s)
        results[name] = {"steps": [steady.as_dict() for steady in found], **_start(engine)}
        del engine
        gc.collect()
    return results


def experts(setting: Setting, findings: Findings) -> dict[str, Any]:
    """The DeepSeek-V3 architecture: latent KV, routed experts. Draft lengths 0 (no drafter), 1 and 3."""
    loaded = setting.load_model(setting.moe)
    results: dict[str, Any] = {}
    plain_tokens: dict[int, float] = {}
    for draft_len in (0, 1, 3):
        engine = _drafting(setting, loaded, draft_len, None)
        found = [measure(engine, loaded.model, size, setting.load) for size in setting.batch_sizes]
        for steady in found:
            num_bytes = loaded.floor.step_bytes(steady.batch_size, steady.context, draft_len)
            if draft_len == 0:
                plain_tokens[steady.batch_size] = steady.tokens_per_s
            floor_ms = findings.floor_ms(num_bytes)
            findings.rows.append(_row(f"experts, K={draft_len}", steady, floor_ms, plain=plain_tokens))
        results[f"K={draft_len}"] = {"steps": [steady.as_dict() for steady in found], **_start(engine)}
        del engine
        gc.collect()
    return results


def same_tokens(setting: Setting, findings: Findings, dense: Loaded) -> dict[str, Any]:
    """Greedy tokens with K drafts that are really judged against plain decoding's, request by request.

    Random weights leave near ties everywhere: a program of another shape may break one differently, and from there on
    the texts have nothing in common. So what counts is where the first difference is.
    """
    batch_size = setting.batch_sizes[-1]
    load = setting.load
    tokens: list[tuple[tuple[int, ...], ...]] = []
    for method in (None, "mtp"):
        config = None if method is None else SpeculativeConfig(method=method, num_speculative_tokens=DRAFT_LEN)
        engine = setting.engine(dense, config, (batch_size,))
        tokens.append(measure(engine, dense.model, batch_size, load).tokens)
        del engine
        gc.collect()
    num_compared = [min(map(len, pair)) for pair in zip(*tokens, strict=True)]
    first = [first_difference(a[:count], b[:count]) for a, b, count in zip(*tokens, num_compared, strict=True)]
    equal = sum(position is None for position in first)
    differing = sorted(position for position in first if position is not None)
    note = f"{equal} of {batch_size} requests equal over {min(num_compared)} tokens or more"
    findings.rows.append(Row(f"greedy tokens, K={DRAFT_LEN} against plain", batch_size, note=note))
    return {"num_equal": equal, "num_requests": batch_size, "compared": num_compared, "first_differences": differing}


def _drafting(setting: Setting, loaded: Loaded, draft_len: int, head_size: int | None) -> Engine:
    config = None
    if draft_len > 0:
        config = SpeculativeConfig(
            num_speculative_tokens=draft_len,
            synthetic_acceptance=forced_acceptance(draft_len),
            draft_vocab_size=head_size,
        )
    return setting.engine(loaded, config)


def _row(
    what: str,
    steady: Steady,
    floor_ms: float | None,
    findings: Findings | None = None,
    *,
    plain: dict[int, float] | None = None,
) -> Row:
    reference = plain if findings is None else findings.plain_tokens_per_s
    plain_tokens_per_s = (reference or {}).get(steady.batch_size)
    against_plain = efficiency = None
    if plain_tokens_per_s is not None and steady.draft_len > 0:
        against_plain = steady.tokens_per_s / plain_tokens_per_s
        efficiency = against_plain / steady.tokens_per_slot
    profile = steady.profile
    return Row(
        what,
        steady.batch_size,
        steady.ms_per_step,
        floor_ms,
        steady.tokens_per_s,
        against_plain,
        efficiency,
        None if profile is None else profile.num_kernels,
        None if profile is None else max(1 - profile.busy_ms / steady.ms_per_step, 0.0),
        note=f"dispatch {steady.dispatch_ms:.2f} ms, context {steady.context:.0f}",
    )


def _start(engine: Engine) -> dict[str, Any]:
    return {"compile_s": round(max(engine.launcher.warm_up_s.values()), 2), "num_programs": engine.launcher.num_traces}
