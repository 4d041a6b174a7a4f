"""How often programs of different width break a floating-point tie differently, and how near those ties were."""

import statistics
from dataclasses import dataclass, replace
from typing import Any

from mtp_jax.bench.equality import differences
from mtp_jax.bench.measure import Workload, run_once
from mtp_jax.bench.prompts import BUILT_IN, tokens_of
from mtp_jax.bench.suite.setting import DRAFT_LEN, Findings, Row, Setting
from mtp_jax.checkpoints import load_model
from mtp_jax.core.sampling_params import SamplingParams
from mtp_jax.core.speculative import SpeculativeConfig
from mtp_jax.llm import LLM
from mtp_jax.policies.fixed import FixedDraftLen
from mtp_jax.text import tokenizer_of

MODEL = "tiny-mtp"


@dataclass(frozen=True)
class Size:
    """How many requests, of how many tokens, how many at once."""

    num_prompts: int
    num_tokens: int
    num_slots: int


def numerics(setting: Setting, findings: Findings) -> dict[str, Any]:
    """Greedy tokens of a trained model at K drafts against plain decoding's.

    A difference ends the comparison of its request: from there on the texts differ. Its margin is the lead of plain
    decoding's best token over the second there, in log-probability.
    """
    size = Size(4, 8, 4) if setting.is_tiny else Size(100, 256, 32)
    found = compare_widths(setting.backends.dtype, setting.backends.attention, size)
    note = (
        f"{found['num_different']} of {size.num_prompts} requests differ within {size.num_tokens} tokens; "
        f"margins up to {found['largest_margin']:.2g}"
    )
    findings.rows.append(Row(f"{MODEL}, {setting.backends.dtype}: K={DRAFT_LEN} against plain", note=note))
    return found


def compare_widths(dtype: str, attention_backend: str, size: Size) -> dict[str, Any]:
    """See `numerics`."""
    loaded = load_model(MODEL, dtype=dtype)
    tokenizer = tokenizer_of(loaded)
    lines = [line for line in BUILT_IN if isinstance(line, str)]
    texts = [f"# {index // len(lines)}\n{lines[index % len(lines)]}" for index in range(size.num_prompts)]
    prompts = tokens_of(texts, tokenizer, size.num_prompts)
    params = SamplingParams(temperature=0, max_tokens=size.num_tokens, ignore_eos=True)
    workload = Workload(prompts, params)
    settings = {
        "max_model_len": max(map(len, prompts)) + size.num_tokens,
        "max_num_seqs": size.num_slots,
        "enable_prefix_caching": False,
        "prefill_chunk": 64,
        "attention_backend": attention_backend,
    }

    def engine(speculative: SpeculativeConfig | None) -> LLM:
        return LLM.from_weights(
            loaded.family,
            loaded.weights,
            tokenizer=tokenizer,
            dtype=loaded.dtype,
            speculative_config=speculative,
            **settings,
        )

    plain_llm = engine(None)
    plain, _ = run_once(plain_llm, workload, FixedDraftLen())
    with_margins, _ = run_once(plain_llm, replace(workload, params=replace(params, logprobs=2)), FixedDraftLen())
    drafting, _ = run_once(engine(SpeculativeConfig(num_speculative_tokens=DRAFT_LEN)), workload, FixedDraftLen())
    margins: list[float] = []
    positions: list[int] = []
    for difference in differences(drafting, plain):
        best, second = (value for _, value in with_margins.logprobs[difference.request][difference.position].top[:2])
        margins.append(best - second)
        positions.append(difference.position)
    all_margins = [token.top[0][1] - token.top[1][1] for request in with_margins.logprobs for token in request]
    return {
        "num_requests": size.num_prompts,
        "num_tokens": size.num_tokens,
        "num_different": len(margins),
        "positions": positions,
        "margins": [round(margin, 5) for margin in margins],
        "largest_margin": max(margins, default=0.0),
        "median_margin_of_all_tokens": round(statistics.median(all_margins), 4),
        "num_tokens_before_differences": sum(positions) + size.num_tokens * (size.num_prompts - len(positions)),
        "plain_equals_itself_with_logprobs": plain.tokens == with_margins.tokens,
    }
