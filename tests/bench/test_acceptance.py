"""`bench acceptance`: the exact shares against their definitions, and the engine's against them."""

from typing import Any

import jax
import numpy as np
import pytest

from mtp_jax.bench.acceptance import WAYS, argmax_share, coupled_share, drawn_share, measure
from mtp_jax.checkpoints import load_model
from mtp_jax.cli import main
from mtp_jax.core.config import SamplingParams
from mtp_jax.core.errors import ConfigError
from mtp_jax.llm import LLM


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_those_of_the_definitions(seed: int) -> None:
    """The sum over pairs, written out, and draws with shared noise; zeros on either side included."""
    rng = np.random.default_rng(seed)
    p_V, q_V = rng.dirichlet(np.full(6, 0.6)), rng.dirichlet(np.full(6, 0.6))
    if seed:
        (p_V if seed == 1 else q_V)[seed] = 0
        p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    both = [x for x in range(6) if p_V[x] > 0 and q_V[x] > 0]
    pairs = sum(1 / sum(max(p_V[y] / p_V[x], q_V[y] / q_V[x]) for y in range(6)) for x in both)
    assert coupled_share(p_V, q_V) == pytest.approx(pairs, abs=1e-12)
    noise = rng.gumbel(size=(40_000, 6))
    with np.errstate(divide="ignore"):
        is_equal = (np.log(p_V) + noise).argmax(axis=1) == (np.log(q_V) + noise).argmax(axis=1)
    assert abs(is_equal.mean() - pairs) < 4 * np.sqrt(pairs * (1 - pairs) / len(noise))
    assert argmax_share(p_V, q_V) <= 1
    total_variation = np.abs(p_V - q_V).sum() / 2
    assert drawn_share(p_V, q_V) == pytest.approx(1 - total_variation)
    assert (1 - total_variation) / (1 + total_variation) - 1e-12 <= pairs <= 1 - total_variation + 1e-12


@pytest.mark.parametrize(
    ("arguments", "named"), [(("--requests", "0"), "--requests is 0"), (("--temperatures", "-1"), "temperature is -1")]
)
def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    assert main(["bench", "acceptance", *arguments]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 3),
        ("top_p", 0.9),
        ("min_p", 0.1),
        ("presence_penalty", 1.0),
        ("logit_bias", {1: 2.0}),
        ("min_tokens", 4),
    ],
)
def test_what_the_laws_are_not_taken_with_is_refused(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    with pytest.raises(ConfigError, match=f"{name} is .*, and bench acceptance compares laws at a temperature alone"):
        measure(None, WAYS[0], {}, [], params)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_the_bundled_model_keeps_as_many_as_the_laws_say(way: object) -> None:
    """Exactly, where everything is greedy; within 4 sigma elsewhere."""
    loaded = load_model("tiny-mtp", dtype="float32")
    settings: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 4, "prefill_chunk": 16}
    spec = {"num_speculative_tokens": 1, **way.speculative}  # type: ignore[attr-defined]
    llm = LLM.from_weights(loaded.family, loaded.weights, speculative_config=spec, **settings)
    prompts = [tuple(np.random.default_rng(seed).integers(3, 900, size=6).tolist()) for seed in range(4)]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=120, ignore_eos=True)
        found = measure(llm, way, loaded.weights, prompts, params)  # type: ignore[arg-type]
        assert found.num_steps > 100
        assert abs(found.sigma) < (4 if temperature else 1e-9)
    jax.clear_caches()
