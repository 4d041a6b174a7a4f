"""Chains and trees: how many drafts, how many positions, how much longer a slot may get; and trees that cannot be."""

import itertools

import pytest

from mtp_jax.core.config import SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.core.topology import CHAIN, MAX_TREE_ROWS, Topology, Tree
from mtp_jax.proposers.registry import check_method


def all_trees() -> list[Tree]:
    trees = []
    for depth, topk, nodes in itertools.product(range(1, 8), range(1, 6), range(1, MAX_TREE_ROWS)):
        try:
            trees.append(Tree(depth, topk, nodes))
        except ConfigError:
            continue
    return trees


TREES = all_trees()


def test_every_tree_shrinks_with_the_draft_length() -> None:
    """Nothing at 0, everything at Kmax, never fewer drafts for a longer length, and always enough to be that deep."""
    assert len(TREES) > 300
    for tree in TREES:
        numbers = [tree.num_drafts(length) for length in range(tree.max_draft_len + 1)]
        assert numbers[0] == 0
        assert numbers[-1] == tree.nodes
        assert numbers == sorted(numbers)
        assert all(length <= number for length, number in enumerate(numbers))
        assert numbers[1] <= tree.topk


def test_what_is_written_is_reserved_and_what_is_gained_is_not_more() -> None:
    for tree in TREES:
        for length in range(tree.max_draft_len + 1):
            whole = tree.num_drafts(length)
            assert tree.num_positions(length, whole) == max(whole + 1, tree.topk * max(length - 1, 0))
            for cap in range(whole + 1):
                assert tree.max_emitted(length, cap) == min(length, cap) + 1 <= tree.num_positions(length, cap)
                assert cap == whole or tree.num_positions(length, cap) == cap + 1


@pytest.mark.parametrize("topology", [CHAIN, Tree(3, 1, 3)], ids=str)
def test_a_chain_and_a_tree_of_one_branch_take_the_same(topology: Topology) -> None:
    for length in range(4):
        assert topology.num_drafts(length) == length
        for cap in range(length + 1):
            assert topology.num_positions(length, cap) == topology.max_emitted(length, cap) == cap + 1


def test_the_default_tree_is_that_of_b07() -> None:
    assert SpeculativeConfig(method="dynamic_tree").topology == Tree(max_draft_len=3, topk=4, nodes=12)
    assert SpeculativeConfig(method="dynamic_tree", tree_nodes=7).topology == Tree(3, 4, 7)
    assert SpeculativeConfig(method="mtp").topology == CHAIN


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tree_nodes": 2}, r"tree_nodes is 2, below num_speculative_tokens=3; the tree could not get that deep\."),
        ({"tree_topk": 0}, r"tree_topk is 0; it must be an integer at least 1\."),
        ({"tree_topk": True}, "tree_topk is True"),
        ({"tree_topk": 1, "tree_nodes": 4}, r"tree_nodes is 4; .* at most 3\."),
        ({"tree_topk": 2, "tree_nodes": 11}, r"tree_nodes is 11; .* at most 10\."),
        ({"tree_topk": 4, "tree_nodes": 32}, r"a tree of 33 rows; attention takes at most 32\."),
        ({"tree_topk": 17, "tree_nodes": 9}, r"a tree of 34 rows; attention takes at most 32\."),
    ],
    ids=str,
)
def test_trees_that_cannot_be_are_refused(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SpeculativeConfig(method="dynamic_tree", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["tree_topk", "tree_nodes"])
def test_a_tree_without_its_method_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option} is 4, which method 'mtp' has no use for"):
        check_method(SpeculativeConfig(**{option: 4}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{option} is 4, and method=None is plain decoding"):
        SpeculativeConfig(method=None, **{option: 4})  # type: ignore[arg-type]
