"""The engine on a GPU: the loop reads nothing implicitly, and tokens are the reference's.

Run on a machine with a GPU: ``python -m pytest --gpu tests/gpu``; with ``-n 8 --dist worksteal`` engines compile side
by side (``XLA_PYTHON_CLIENT_MEM_FRACTION=.1``).
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import SamplingParams
from mtp_jax.checkpoints import load_model
from mtp_jax.core.config import EngineConfig, SpeculativeConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.requests import Request
from tests.gpu.outputs import MAX_TOKENS, Engines, Written

pytestmark = [pytest.mark.gpu, pytest.mark.standard_promotion]


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Engines:
    base = tmp_path_factory.getbasetemp()
    folder: Path = (base if worker_id == "master" else base.parent) / "engines"
    folder.mkdir(exist_ok=True)
    return Engines(folder)


# --- the Hopper kernels in the whole engine


@pytest.mark.parametrize("drafts", ["plain", "mtp", "tree"])
def test_mosaic_gpu_gives_the_greedy_tokens_of_the_reference_in_float32(engines: Engines, drafts: str) -> None:
    given = engines.greedy("float32", "mosaic_gpu", drafts)
    assert given.tokens == engines.greedy("float32").tokens
    assert all(len(tokens) == MAX_TOKENS for tokens in given.tokens)


@pytest.mark.parametrize("drafts", ["plain", "mtp", "tree"])
def test_in_bfloat16_the_first_different_token_was_nearly_a_tie(
    engines: Engines, drafts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        assert_nearly_tied(
            f"bfloat16, {drafts}", engines.greedy("bfloat16"), engines.greedy("bfloat16", "mosaic_gpu", drafts)
        )


@pytest.mark.parametrize("drafts", ["plain", "mtp"])
def test_with_the_kernel_for_experts_the_first_different_token_was_nearly_a_tie(
    engines: Engines, drafts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = engines.experts("mosaic_gpu", drafts)
    with capsys.disabled():
        assert_nearly_tied(f"experts, {drafts}", engines.experts("reference"), given, tie=EXPERTS_TIE)


BF16_TIE = 0.1
"""Nats: logits of about 20 are bfloat16 numbers 2^-4 apart or nearer, and ten layers lie before them."""

EXPERTS_TIE = 0.25
"""Random logits whose deviation is 3.4, of a state that four layers have rounded by a hundredth or two of its size."""


def assert_nearly_tied(name: str, expected: Written, given: Written, tie: float = BF16_TIE) -> None:
    differences = []
    for index, (one, other) in enumerate(zip(expected.tokens, given.tokens, strict=True)):
        assert len(one) == len(other) == MAX_TOKENS
        first = next((i for i in range(MAX_TOKENS) if one[i] != other[i]), None)
        if first is not None:
            differences.append((index, first, round(expected.margins[index][first], 4)))
    print(f"\n{name}: {len(differences)} of {len(expected.tokens)} differ (prompt, token, lead in nats): {differences}")
    assert all(margin < tie for *_, margin in differences)


# --- the engine with the reference's attention


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculative_tokens_equal_plain_ones_in_float32(engines: Engines, temperature: float) -> None:
    write = engines.greedy if temperature == 0.0 else engines.sampled
    order = ("plain", "mtp") if temperature == 0.0 else ("mtp", "plain")  # two workers compile one each
    written = {drafts: write("float32", drafts=drafts).tokens for drafts in order}
    assert written["mtp"] == written["plain"]


def test_the_loop_makes_no_implicit_transfer_either_way() -> None:
    loaded = load_model("tiny-mtp", dtype="float32")
    config = EngineConfig(
        max_model_len=128, max_num_seqs=2, prefill_chunk=16, speculative=SpeculativeConfig(num_speculative_tokens=1)
    )
    engine = Engine(loaded.family, loaded.weights, config)
    params = SamplingParams(temperature=0.7, max_tokens=40, logprobs=2, ignore_eos=True)
    for index in range(3):
        engine.submit(Request(str(index), (5, 6, 7 + index), params, seed=index))
    finished = {}
    with jax.transfer_guard_device_to_host("disallow"), jax.transfer_guard_host_to_device("disallow"):
        for progress in engine.run():
            if progress.finish_reason is not None:
                finished[progress.request_id] = progress.state
    assert sorted(finished) == ["0", "1", "2"]
    assert all(len(state.tokens) == len(state.logprobs) == 40 for state in finished.values())


def test_the_guard_of_the_test_above_does_fire() -> None:
    on_device = jnp.arange(3) + 1
    with jax.transfer_guard_device_to_host("disallow"), pytest.raises(Exception, match=r"[Dd]isallowed"):
        np.asarray(on_device)
