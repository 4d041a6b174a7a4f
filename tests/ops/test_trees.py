"""Draft trees on the device against plain Python, on random trees."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.types import Drafts, LayerKV
from mtp_jax.ops.kv_cache import compact_kv
from mtp_jax.ops.row_text import texts_of_rows
from mtp_jax.ops.trees import ancestor_bits, depths, path_to
from mtp_jax.testing.rows import sampling_rows, slot_view

Parents = tuple[int, ...]


def random_trees(num_nodes: int) -> st.SearchStrategy[Parents]:
    """Parents before children; chains, combs and stars are among them."""
    return st.tuples(*[st.integers(0, row) for row in range(num_nodes)])


two_trees = st.sampled_from((1, 7, 31)).flatmap(lambda nodes: st.tuples(random_trees(nodes), random_trees(nodes)))


@jax.jit
def bits_depths_and_paths(parent_BK: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Paths to each row: [row, slot, place]."""
    bits = ancestor_bits(parent_BK)
    num_rows = bits.shape[1]
    rows = [jnp.full(parent_BK.shape[:1], row) for row in range(num_rows)]
    return bits, depths(bits), jnp.stack([path_to(bits, row, num_rows) for row in rows])


def path_by_hand(parents: Parents, row: int) -> list[int]:
    path = [row]
    while path[-1] != 0:
        path.append(parents[path[-1] - 1])
    return path[::-1]


@given(trees=two_trees)
def test_bits_depths_and_paths_are_those_of_a_walk_to_the_root(trees: tuple[Parents, ...]) -> None:
    bits, depth, paths = (np.asarray(x) for x in bits_depths_and_paths(np.array(trees, np.int32)))
    for slot, parents in enumerate(trees):
        for row in range(len(parents) + 1):
            path = path_by_hand(parents, row)
            assert int(bits[slot, row]) == sum(1 << ancestor for ancestor in path)
            assert depth[slot, row] == len(path) - 1
            assert paths[row, slot].tolist() == path + [0] * (len(parents) + 1 - len(path))


texts = jax.jit(texts_of_rows)


@given(trees=two_trees)
def test_a_row_speaks_after_the_drafts_on_its_path(trees: tuple[Parents, ...]) -> None:
    num_drafts = len(trees[0])
    slots = slot_view(sampling_rows(*[SamplingParams()] * 2), vocab_size=8, draft_len=1)
    parent_BK = jnp.array(trees, jnp.int32)
    is_before = np.asarray(texts(slots, Drafts(tokens_BK=parent_BK, parent_BK=parent_BK)).is_before_BWK)
    for slot, parents in enumerate(trees):
        for row in range(num_drafts + 1):
            assert [draft + 1 for draft in np.flatnonzero(is_before[slot, row])] == path_by_hand(parents, row)[1:]


def test_a_chain_is_the_tree_in_which_each_follows_the_one_before() -> None:
    slots = slot_view(sampling_rows(SamplingParams()), vocab_size=8, draft_len=5)
    tokens = jnp.arange(5)[None]
    chain, tree = texts_of_rows(slots, Drafts(tokens)), texts_of_rows(slots, Drafts(tokens, parent_BK=tokens))
    assert np.array_equal(chain.is_before_BWK, tree.is_before_BWK)


compacted = jax.jit(compact_kv)


@given(parents=random_trees(8), base=st.integers(0, 9), data=st.data())
def test_bug_b134_compaction_leaves_what_the_path_as_a_chain_would_have_written(
    parents: Parents, base: int, data: st.DataObject
) -> None:
    """Positions hold their number; after it the path stands side by side, and nothing else has moved."""
    row = data.draw(st.integers(0, 8))
    path = path_by_hand(parents, row)
    num_rows = data.draw(st.integers(0, len(path)))
    table = data.draw(st.permutations(range(1, 8)))[:6]
    pages = np.full((8, 3, 1, 2), -1.0, np.float32)
    pages[table] = np.arange(18.0)[:, None].repeat(2, 1).reshape(6, 3, 1, 2)
    layer = LayerKV(k_pages=jnp.asarray(pages), v_pages=jnp.asarray(pages + 100) if row % 2 else None)
    path_BE = jnp.array([path + [0] * (9 - len(path))])
    (moved,) = compacted([layer], jnp.array([table]), jnp.array([base]), path_BE, jnp.array([num_rows]))
    expected = np.arange(18.0)
    expected[base : base + num_rows] = [base + r for r in path[:num_rows]]
    k = np.asarray(moved.k_pages)
    np.testing.assert_array_equal(k[table].reshape(18, 2)[:, 0], expected)
    others = [page for page in range(1, 8) if page not in table]
    np.testing.assert_array_equal(k[others], pages[others])
    if moved.v_pages is not None:
        np.testing.assert_array_equal(np.asarray(moved.v_pages)[table].reshape(18, 2)[:, 0], expected + 100)
