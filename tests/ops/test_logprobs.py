"""Raw log-probabilities of a prompt's rows, however many of them are computed at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.ops import logprobs
from mtp_jax.ops.logprobs import prompt_logprobs
from mtp_jax.testing.oracle import log_softmax

NUM_SLOTS, WIDTH, VOCAB = 2, 3, 7


@pytest.mark.parametrize("num_rows", [1, 4, 5, 8, 11])
def test_blocks_of_rows_come_back_in_their_order(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows than a block, whole blocks, and a last one that is partly padding."""
    monkeypatch.setattr(logprobs, "_ROWS_AT_ONCE", 4)
    rng = np.random.default_rng(num_rows)
    hidden_YTD = rng.normal(size=(NUM_SLOTS, num_rows, WIDTH)).astype(np.float32)
    head_DV = rng.normal(size=(WIDTH, VOCAB)).astype(np.float32)
    next_YT = rng.integers(0, VOCAB, (NUM_SLOTS, num_rows)).astype(np.int32)

    def unembed(hidden_YRD: jax.Array) -> jax.Array:
        assert hidden_YRD.shape[1] <= 4
        return jnp.einsum("yrd,dv->yrv", hidden_YRD, head_DV)

    found = jax.jit(lambda hidden, tokens: prompt_logprobs(hidden, tokens, unembed, jnp.array(True), 2))(
        hidden_YTD, next_YT
    )
    for slot in range(NUM_SLOTS):
        for row in range(num_rows):
            expected_V, token = log_softmax(hidden_YTD[slot, row] @ head_DV), next_YT[slot, row]
            assert float(found.chosen_BE[slot, row]) == pytest.approx(expected_V[token], abs=1e-5)
            assert int(found.rank_BE[slot, row]) == 1 + (expected_V > expected_V[token]).sum()
            assert found.top_ids_BEQ[slot, row].tolist() == np.argsort(-expected_V)[:2].tolist()


def test_nobody_asking_costs_no_logits() -> None:
    found = prompt_logprobs(
        jnp.full((1, 5, WIDTH), jnp.nan), jnp.zeros((1, 5), jnp.int32), lambda x: x, jnp.array(False), 2
    )
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(found))
