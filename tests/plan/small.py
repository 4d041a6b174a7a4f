"""Small questions, quick to answer."""

from functools import cache
from typing import Any

from mtp_jax.core.config import MeshConfig, SpeculativeConfig
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.registry import family_from_config
from mtp_jax.plan.chips import slice_named
from mtp_jax.plan.plan import Question
from tests.models.shapes import config_of


@cache
def small_family(model_type: str = "deepseek_v3", *features: str, **changes: Any) -> MtpDecoder:
    family = family_from_config(config_of(model_type, *features, **changes))
    assert isinstance(family, MtpDecoder)
    return family


def question(family: MtpDecoder, *, data: int = 2, model: int = 2, **changes: Any) -> Question:
    settings: dict[str, Any] = {
        "speculative": SpeculativeConfig(num_speculative_tokens=1),
        "context": 64,
        "page_size": 16,
        "batch_sizes": (2, 8),
        "attention_backend": "reference",
    }
    return Question(
        family, slice_named(f"h200:{data * model}"), MeshConfig(data=data, model=model), **settings | changes
    )
