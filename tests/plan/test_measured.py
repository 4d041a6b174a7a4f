"""Floors against what was measured on an H200: never above it, and as far below as `docs/how-to/plan.md` says."""

import json
from typing import Any

import pytest

from mtp_jax.bench.suite.models import DENSE
from mtp_jax.core.config import MeshConfig, SpeculativeConfig
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.registry import family_from_config
from mtp_jax.plan import Question, make_plan, planned_family, slice_named
from mtp_jax.plan.chips import chips
from mtp_jax.plan.floor import Roofline, expected_experts
from mtp_jax.plan.program import PlannedStep, abstract_target
from tests.architecture.repository import ROOT
from tests.models.shapes import config_of

H200 = chips()["h200"]
PAGE = (ROOT / "docs" / "how-to" / "plan.md").read_text()


def measured(what: str) -> dict[str, dict[str, Any]]:
    """Results of a recording, by name."""
    file = ROOT / "docs" / "measurements" / f"2026-11-30-h200-{what}.json"
    return {result["name"]: result for result in json.loads(file.read_text())["results"]}


def is_told(ratio: float) -> bool:
    """Whether the page has the ratio in its table."""
    return f" {ratio:.2f} |" in PAGE


ATTENTION = [
    ("gqa W1", config_of("llama", num_attention_heads=32, num_key_value_heads=8, head_dim=128), 1),
    ("gqa W4", config_of("llama", num_attention_heads=32, num_key_value_heads=8, head_dim=128), 4),
    *(
        (
            f"mla{heads} W{rows}",
            config_of("deepseek_v3", num_attention_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64),
            rows,
        )
        for heads in (16, 128)
        for rows in (1, 4)
    ),
]


@pytest.mark.parametrize(("name", "config", "rows"), ATTENTION, ids=[name for name, _, _ in ATTENTION])
def test_attention(name: str, config: dict[str, Any], rows: int) -> None:
    family = family_from_config(config | {"max_position_embeddings": 8192})
    assert isinstance(family, MtpDecoder)
    asked = Question(family, slice_named("h200:1"), MeshConfig(), SpeculativeConfig(), context=4096)
    engine = asked.config(64)
    roofline = Roofline(PlannedStep(family, engine, "bfloat16", abstract_target(asked.where, engine)), 4096)
    load = roofline.attention(family.kv_specs()[:1], 64, rows)
    floor_us = 1e6 * max(load.num_bytes / H200.hbm_bytes_s, load.flop / H200.flop_s)
    newest = measured("paged-attention") | measured("paged-attention_few_rows")
    ratio = newest[name]["us"] / floor_us
    assert ratio > 1
    assert is_told(ratio), ratio


@pytest.mark.parametrize(
    ("name", "num_experts", "size", "num_tokens", "num_active"),
    [
        ("32 of 7168 x 4096, 64 tokens, one each, mosaic_gpu", 32, 7168 * 4096, 64, 1),
        ("32 of 7168 x 4096, 256 tokens, one each, mosaic_gpu", 32, 7168 * 4096, 256, 1),
        ("64 of 2048 x 2816, 8 tokens, six each, mosaic_gpu", 64, 2048 * 2816, 8, 6),
        ("64 of 2048 x 2816, 64 tokens, six each, mosaic_gpu", 64, 2048 * 2816, 64, 6),
    ],
)
def test_experts(name: str, num_experts: int, size: int, num_tokens: int, num_active: int) -> None:
    active = expected_experts(num_experts, num_active, num_tokens)
    ratio = measured("grouped-matmul")[name]["us"] / (1e6 * active * 2 * size / H200.hbm_bytes_s)
    assert ratio > 1
    assert is_told(ratio), ratio


STEPS = [
    *(f"plain, greedy program, batch {batch}" for batch in (1, 8, 64)),
    *(f"plain, streamed products, batch {batch}" for batch in (1, 8, 64)),
    *(f"plain, streamed products, read two steps late, batch {batch}" for batch in (1, 8)),
    *(f"K = 3, full head, streamed products up to 64 rows, batch {batch}" for batch in (1, 8, 64)),
]


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_a_dense_model(name: str) -> None:
    step = measured("suite")[name]
    context = round(step["context"])
    asked = Question(DENSE.family(), slice_named("h200:1"), MeshConfig(), SpeculativeConfig(), context=context)
    config = asked.config(1)
    roofline = Roofline(PlannedStep(asked.family, config, "bfloat16", abstract_target(asked.where, config)), context)
    ratio = step["step_ms"] / (1e3 * roofline.floor(step["batch_size"], step["draft_len"], ()).seconds)
    assert ratio > 1
    assert is_told(ratio), ratio


def test_steps_of_the_bundled_model() -> None:
    family = planned_family("tiny-mtp")
    asked = Question(
        family,
        slice_named("h200:1"),
        MeshConfig(),
        SpeculativeConfig(method=None),
        context=192,
        batch_sizes=(1,),
        attention_backend="reference",
    )
    [batch] = make_plan(asked).batches
    ratio = 1 / measured("decode")["bfloat16, plain"]["tokens_per_s"] / batch.floors[0].seconds
    assert ratio > 1
    assert f"about {round(ratio, -1):,.0f} times its floor" in PAGE
