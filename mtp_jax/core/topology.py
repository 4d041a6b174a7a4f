"""What a step's drafts hang on, a chain or a tree, and what each takes: rows to verify, positions to write.

Of a step with draft length K three numbers are needed, and for a chain they are all the same. A tree keeps them apart:
its drafts are nodes, more of them than it is deep.

>>> tree = Tree(max_draft_len=3, topk=4, nodes=12)
>>> [tree.num_drafts(k) for k in range(4)], [CHAIN.num_drafts(k) for k in range(4)]
([0, 4, 8, 12], [0, 1, 2, 3])
>>> tree.num_positions(3, 12), tree.max_emitted(3, 12), CHAIN.num_positions(3, 3), CHAIN.max_emitted(3, 3)
(13, 4, 4, 4)
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mtp_jax.core.errors import ConfigError

MAX_TREE_ROWS = 32
"""Rows that the attention contract's ancestor bits can speak of, the pending token's included."""
DEFAULT_TREE_TOPK = 4


@runtime_checkable
class Topology(Protocol):
    """`draft_cap` is a slot's own limit of drafts, 0..num_drafts(draft_len); drafts past it are not made."""

    @property
    def is_tree(self) -> bool:
        """Whether drafts may have siblings: their parents then travel with them."""
        ...

    def num_drafts(self, draft_len: int) -> int:
        """Drafts that a step verifies beside the pending token. 0 at draft length 0; grows with it."""
        ...

    def num_positions(self, draft_len: int, draft_cap: int) -> int:
        """Positions, from the pending token's on, that target and drafter may write: to be reserved."""
        ...

    def max_emitted(self, draft_len: int, draft_cap: int) -> int:
        """Tokens that a slot may gain: by how much the bound on its length grows."""
        ...


@dataclass(frozen=True)
class Chain:
    """Each draft follows the one before it."""

    @property
    def is_tree(self) -> bool:
        return False

    def num_drafts(self, draft_len: int) -> int:
        return draft_len

    def num_positions(self, draft_len: int, draft_cap: int) -> int:  # noqa: ARG002
        return draft_cap + 1

    def max_emitted(self, draft_len: int, draft_cap: int) -> int:  # noqa: ARG002
        return draft_cap + 1


@dataclass(frozen=True)
class Tree:
    """Up to `nodes` drafts, at most `max_draft_len` deep; `topk` continuations of a node, `topk` nodes a level go on.

    Nodes come in the order of their scores, parents before children, so that a slot's cap keeps the first ones.
    """

    max_draft_len: int
    topk: int
    nodes: int

    def __post_init__(self) -> None:
        depth, topk, nodes = self.max_draft_len, self.topk, self.nodes
        if topk < 1:
            raise ConfigError(f"tree_topk is {topk}; a node needs at least 1 continuation.")
        if nodes < depth:
            raise ConfigError(
                f"tree_nodes is {nodes}, below num_speculative_tokens={depth}; the tree could not get that deep."
            )
        most = self._num_candidates(depth)
        if nodes > most:
            raise ConfigError(
                f"tree_nodes is {nodes}; with tree_topk={topk} and num_speculative_tokens={depth} a tree has at most "
                f"{most}."
            )
        if self.num_rows > MAX_TREE_ROWS:
            raise ConfigError(
                f"tree_topk={topk}, tree_nodes={nodes} and num_speculative_tokens={depth} make a tree of "
                f"{self.num_rows} rows; attention takes at most {MAX_TREE_ROWS}."
            )

    @property
    def is_tree(self) -> bool:
        return True

    @property
    def num_rows(self) -> int:
        """The most rows of a slot that attend each other: the target's, or all of the drafter's."""
        return max(self.nodes + 1, self.num_drafter_rows(self.max_draft_len))

    def num_drafts(self, draft_len: int) -> int:
        if draft_len == 0:
            return 0
        share = -(-self.nodes * draft_len // self.max_draft_len)
        return min(share, self._num_candidates(draft_len))

    def num_drafter_rows(self, draft_len: int) -> int:
        """Nodes that a recursive drafter takes in: `topk` of every level but the last, which nothing follows."""
        return self.topk * max(draft_len - 1, 0)

    def num_positions(self, draft_len: int, draft_cap: int) -> int:
        return draft_cap + 1 + (self.num_drafter_positions(draft_len) if draft_cap >= self.num_drafts(draft_len) else 0)

    def num_drafter_positions(self, draft_len: int) -> int:
        """Positions past the last draft's row that the drafter of a whole tree writes; that of a cut one stays within.

        >>> Tree(max_draft_len=3, topk=8, nodes=10).num_drafter_positions(3)  # 16 rows of the drafter, 11 of the target
        5
        """
        return max(self.num_drafter_rows(draft_len) - (self.num_drafts(draft_len) + 1), 0)

    def max_emitted(self, draft_len: int, draft_cap: int) -> int:
        return min(draft_len, draft_cap) + 1

    def _num_candidates(self, draft_len: int) -> int:
        """All that is ever scored: `topk` after the pending token, then `topk` after each of `topk` nodes a level."""
        return self.topk + (draft_len - 1) * self.topk**2 if draft_len else 0


CHAIN = Chain()
