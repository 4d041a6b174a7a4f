"""What a caller of `paged_attention` is told: wrong shapes, wrong values, no such backend, what a backend cannot do."""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.paged_attention import BACKENDS, Backend, Problem, paged_attention, select_backend, supports
from kernels_pallas.paged_attention.arg_specs import ARG_SPECS, PagedInputs, make_inputs

SPEC = replace(ARG_SPECS["mla_8_tree"], num_rows=3, committed_len=(20, 3), tree_parents=(-1, 0, 0), page_size=16)
CONFIG = SPEC.config("reference")
GROUPED = replace(ARG_SPECS["mqa_8_edges"], num_kv_heads=2, committed_len=(20, 3))


@pytest.fixture(scope="module")
def inputs() -> PagedInputs:
    return make_inputs(SPEC, jax.random.key(0))


def zeros(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"q_BWHC": zeros(2, 3, 192)}, "q has shape"),
        ({"q_BWHC": zeros(2, 0, 8, 192)}, "q has shape"),
        ({"q_BWHC": zeros(2, 3, 8, 192, dtype="int32")}, "q has dtype int32"),
        ({"k_pages_NZGC": zeros(9, 16, 1, 64)}, "k_pages has shape"),
        ({"k_pages_NZGC": zeros(9, 16, 3, 192)}, "8 query heads do not divide over 3"),
        ({"k_pages_NZGC": zeros(9, 16, 2, 192)}, "latent pages"),
        ({"v_pages_NZGE": zeros(9, 16, 1, 128)}, "v_pages has shape"),
        ({"page_table_BP": zeros(1, 4, dtype="int32")}, "page_table has shape"),
        ({"page_table_BP": zeros(2, 0, dtype="int32")}, "page_table has shape"),
        ({"page_table_BP": zeros(2, 4)}, "page_table has dtype float32"),
        ({"committed_len_B": zeros(3, dtype="int32")}, "committed_len has shape"),
        ({"committed_len_B": zeros(2, dtype="uint32")}, "committed_len has dtype uint32"),
        ({"ancestor_bits_BW": zeros(2, 4, dtype="uint32")}, "ancestor_bits has shape"),
        ({"ancestor_bits_BW": zeros(2, 3, dtype="int32")}, "ancestor_bits has dtype int32"),
        ({"q_BWHC": zeros(2, 33, 8, 192), "ancestor_bits_BW": zeros(2, 33, dtype="uint32")}, "33 rows do not fit"),
    ],
)
def test_arrays_that_do_not_fit_are_named(inputs: PagedInputs, change: dict[str, jax.Array], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        paged_attention(*inputs._replace(**change), config=CONFIG)


@pytest.mark.parametrize("v_channels", [0, 193])
def test_latent_values_are_channels_of_the_keys(inputs: PagedInputs, v_channels: int) -> None:
    with pytest.raises(ValueError, match=f"v_channels is {v_channels}"):
        paged_attention(*inputs, config=replace(CONFIG, v_channels=v_channels))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"committed_len_B": jnp.array([200, 3], jnp.int32)}, "the page table ends at position"),
        (
            {"page_table_BP": jnp.array([[1, 99, 0, 0, 0], [2, 0, 0, 0, 0]], jnp.int32)},
            r"page_table\[0, 1\] is page 99",
        ),
        (
            {"page_table_BP": jnp.array([[1, 3, 0, 0, 0], [-1, 0, 0, 0, 0]], jnp.int32)},
            r"page_table\[1, 0\] is page -1",
        ),
        ({"ancestor_bits_BW": jnp.array([[1, 1, 5], [1, 3, 5]], jnp.uint32)}, "lacks a row's own bit"),
    ],
)
def test_debug_catches_wrong_values(inputs: PagedInputs, change: dict[str, jax.Array], sentence: str) -> None:
    wrong = inputs._replace(**change)
    config = replace(CONFIG, debug=True)
    with pytest.raises(ValueError, match=sentence):
        paged_attention(*wrong, config=config)

    @jax.jit
    def program(*arrays: jax.Array) -> jax.Array:
        return paged_attention(*arrays, config=config)

    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        jax.block_until_ready(program(*wrong))


@pytest.mark.parametrize("spec", [SPEC, GROUPED], ids=["latent", "grouped"])
def test_debug_leaves_right_values_alone(spec: object) -> None:
    # Their tables hold ids that do not exist, behind the last page that is read.
    assert isinstance(spec, type(SPEC))
    arrays = make_inputs(replace(spec, num_unused_entries=3), jax.random.key(0))
    plain = paged_attention(*arrays, config=spec.config("reference"))
    config = spec.config("reference", debug=True)
    assert jnp.array_equal(paged_attention(*arrays, config=config), plain)
    assert jnp.array_equal(jax.jit(lambda *traced: paged_attention(*traced, config=config))(*arrays), plain)


def test_debug_lets_padding_rows_pass_the_table(inputs: PagedInputs) -> None:
    num_positions = inputs.page_table_BP.shape[1] * SPEC.page_size
    near_end = inputs._replace(
        committed_len_B=jnp.array([num_positions - 1, 3], jnp.int32), page_table_BP=jnp.ones_like(inputs.page_table_BP)
    )
    paged_attention(*near_end, config=replace(CONFIG, debug=True))


def test_an_unknown_backend_is_refused(inputs: PagedInputs) -> None:
    for call in (
        lambda: paged_attention(*inputs, config=replace(CONFIG, backend="triton")),
        lambda: supports("triton", SPEC.problem()),
        lambda: select_backend("triton", "cpu"),
    ):
        with pytest.raises(ValueError, match=r"attention backend is 'triton'; it must be .*'reference'"):
            call()


def test_what_a_backend_cannot_do_is_refused_and_not_run(inputs: PagedInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(problem: Problem) -> str | None:
        return f"{problem.num_rows} rows, and it has at most 2." if problem.num_rows > 2 else None

    def never(*args: object, **kwargs: object) -> jax.Array:
        raise AssertionError("a call that is not supported was run")

    monkeypatch.setitem(BACKENDS, "limited", Backend(never, limited, supports_device_lengths=True))
    with pytest.raises(NotImplementedError, match="backend 'limited' cannot do this: 3 rows"):
        paged_attention(*inputs, config=replace(CONFIG, backend="limited"))
    assert supports("limited", replace(SPEC, num_rows=2).problem()) is None


def test_a_spec_states_the_facts_that_a_call_has(inputs: PagedInputs) -> None:
    q_BWHC, k_pages, v_pages, page_table_BP, _, ancestor_bits_BW = inputs
    assert Problem.of(q_BWHC, k_pages, v_pages, page_table_BP, ancestor_bits_BW, CONFIG) == SPEC.problem()


def test_auto_is_decided_by_the_platform() -> None:
    assert select_backend("auto", "cpu") == "reference"
    assert select_backend("reference", "tpu") == "reference"
    with pytest.raises(ValueError, match="platform 'abacus'"):
        select_backend("auto", "abacus")


def test_kernels_need_jax_alone() -> None:
    code = (
        "import sys, kernels_pallas.paged_attention.arg_specs\n"
        "assert not {'mtp_jax', 'flax', 'jaxtyping'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
