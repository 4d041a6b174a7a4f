"""The work list of the Hopper kernels: every block of context of every slot, cut into equal shares for the CTAs.

An *item* is one output tile: a slot, a key head, and up to 64 packed query rows. Item t covers `num_blocks` blocks of
context, preceded by `overhead` blocks that stand for the fixed cost of starting an item. All items of all live slots
laid end to end form one line; CTA i owns `share` consecutive blocks of it, so contexts of any lengths load the CTAs
equally, and an item is cut at most once per CTA. Nothing here is known before the lengths are: each CTA walks the
lengths itself, which costs less than a launch of its own.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

TILE = 64
"""Rows of a matrix-unit tile: the most packed query rows that an item holds."""

_UNROLL = 32  # lengths are read in groups: one group's loads are in flight together


@dataclass(frozen=True)
class Layout:
    """The static sizes of a call, in the kernels' own units."""

    num_slots: int
    num_rows: int  # W
    group: int  # query heads per key head
    num_kv_heads: int
    k_channels: int
    v_channels: int
    page_size: int
    pages_per_slot: int
    num_pages: int
    tile_rows: int  # packed query rows an item holds: a multiple of 8, at most 64
    out_rows: int  # rows from one item to the next in the kernels' output, at least tile_rows
    num_row_tiles: int
    is_latent: bool
    is_tree: bool  # ancestor bits say what rows attend among themselves
    block: int  # positions a compute step takes
    num_stages: int  # blocks in flight
    overhead: int  # blocks that starting an item costs
    min_share: int  # fewest blocks worth a CTA
    slack: (
        int  # percent that a share may grow if items of about one length are then cut into equal parts, or not at all
    )
    num_ctas: int
    is_turned: bool  # packed rows lie along the short side of the matrix units' tiles

    @property
    def items_per_slot(self) -> int:
        return self.num_kv_heads * self.num_row_tiles

    @property
    def num_items(self) -> int:
        return self.num_slots * self.items_per_slot

    @property
    def num_positions(self) -> int:
        return self.page_size * self.pages_per_slot


def num_blocks(layout: Layout, committed_len: jax.Array) -> jax.Array:
    """Blocks that hold a position some row attends; 0 for a dead slot."""
    end = jnp.minimum(committed_len + layout.num_rows, layout.num_positions)
    return jnp.where(committed_len >= 0, lax.div(end + (layout.block - 1), layout.block), 0)


def tile_blocks(layout: Layout, committed_len: jax.Array, row_tile: jax.Array) -> jax.Array:
    """Blocks that hold a position some row of the tile attends; 0 for a dead slot. At most `num_blocks`."""
    if layout.is_tree or layout.num_row_tiles == 1:
        return num_blocks(layout, committed_len)
    last_packed = jnp.minimum((row_tile + 1) * layout.tile_rows, layout.num_rows * layout.group) - 1
    end = jnp.minimum(committed_len + lax.div(last_packed, layout.group) + 1, layout.num_positions)
    return jnp.where(committed_len >= 0, lax.div(end + (layout.block - 1), layout.block), 0)


def item_len(layout: Layout, committed_len: jax.Array, overhead: jax.Array) -> jax.Array:
    """An item's length on the line: its blocks and the overhead; 0 for a dead slot."""
    blocks = num_blocks(layout, committed_len)
    return jnp.where(blocks > 0, blocks + overhead, 0)


def _fold_slots(layout: Layout, lens_ref, step, init):
    """Folds `step(slot, committed length of the slot, carry)` over the slots."""
    full = layout.num_slots // _UNROLL * _UNROLL

    def group(index, carry):
        first = index * _UNROLL
        lens = [lens_ref[first + i] for i in range(_UNROLL)]
        for i in range(_UNROLL):
            carry = step(first + i, lens[i], carry)
        return carry

    carry = lax.fori_loop(0, full // _UNROLL, group, init) if full else init
    for slot in range(full, layout.num_slots):
        carry = step(jnp.int32(slot), lens_ref[slot], carry)
    return carry


_MOST_CUTS = 4


_LONGEST = 2**30


def share_of(layout: Layout, lens_ref) -> tuple[jax.Array, jax.Array]:
    """(blocks of the line that each CTA owns, overhead of an item on it).

    Contexts of about one length are cut at the same places, into as few parts as `slack` allows: fewer parts are
    merged. Each CTA then starts as many items as any other, so that what a start costs needs no room on the line.
    """

    def step(_, committed_len, carry):
        total, num_live, longest, shortest = carry
        blocks = num_blocks(layout, committed_len)
        is_live = blocks > 0
        return (
            total + blocks,
            num_live + is_live.astype(jnp.int32),
            jnp.maximum(longest, blocks),
            jnp.where(is_live, jnp.minimum(shortest, blocks), shortest),
        )

    zero = jnp.int32(0)
    total, num_live, longest, shortest = _fold_slots(layout, lens_ref, step, (zero, zero, zero, jnp.int32(_LONGEST)))
    share = _per_cta(layout, (total + num_live * layout.overhead) * layout.items_per_slot)
    overhead = jnp.int32(layout.overhead)
    if layout.slack:
        equal = _per_cta(layout, total * layout.items_per_slot)
        is_even = longest * 100 <= shortest * (100 + layout.slack)
        for parts in range(_MOST_CUTS, 0, -1):
            candidate = lax.div(longest + (parts - 1), parts)
            is_near = is_even & (candidate >= equal) & (candidate * 100 <= equal * (100 + layout.slack))
            share = jnp.where(is_near, candidate, share)
            overhead = jnp.where(is_near, 0, overhead)
    return share, overhead


def _per_cta(layout: Layout, total: jax.Array) -> jax.Array:
    return jnp.maximum(lax.div(total + (layout.num_ctas - 1), layout.num_ctas), layout.min_share)


def locate(layout: Layout, lens_ref, place: jax.Array, overhead: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The item that covers a place on the line: (item, where the item starts, length of the line)."""

    def step(slot, committed_len, carry):
        end, found_slot, found_start = carry
        length = item_len(layout, committed_len, overhead) * layout.items_per_slot
        is_here = (place >= end) & (place < end + length)
        return (
            end + length,
            jnp.where(is_here, slot, found_slot),
            jnp.where(is_here, end, found_start),
        )

    zero = jnp.int32(0)
    total, slot, start = _fold_slots(layout, lens_ref, step, (zero, zero, zero))
    length = jnp.maximum(item_len(layout, lens_ref[slot], overhead), 1)
    sub = jnp.minimum(lax.div(place - start, length), layout.items_per_slot - 1)
    return slot * layout.items_per_slot + sub, start + sub * length, total


@dataclass(frozen=True)
class Part:
    """What one CTA does of one item: blocks `first`..`last` - 1 of context for slot, head and row tile."""

    item: jax.Array
    slot: jax.Array
    kv_head: jax.Array
    row_tile: jax.Array
    committed_len: jax.Array
    first: jax.Array
    last: jax.Array
    first_cta: jax.Array  # the CTA that holds the item's first block ...
    last_cta: jax.Array  # ... and the one that holds its last


@dataclass(frozen=True)
class Share:
    """A CTA's stretch of the line, and the item at its start."""

    blocks: jax.Array  # of every CTA's share
    overhead: jax.Array  # before each item on the line
    begin: jax.Array
    end: jax.Array
    item: jax.Array
    item_start: jax.Array  # where that item starts on the line


def own_share(layout: Layout, lens_ref, cta: jax.Array) -> Share:
    """Walks the lengths; a CTA's warpgroups do it together, before their ways part, so that its code exists once."""
    share, overhead = share_of(layout, lens_ref)
    begin = cta * share
    item, start, total = locate(layout, lens_ref, begin, overhead)
    start = jnp.where(begin < total, start, total)  # a CTA past the end of the line owns nothing
    end = jnp.minimum(begin + share, total)
    return Share(blocks=share, overhead=overhead, begin=begin, end=end, item=item, item_start=start)


def for_each_part(layout: Layout, lens_ref, share: Share, body, init):
    """Runs `body(part, carry) -> carry` for the parts of the share, in order."""
    begin, end = share.begin, share.end

    def is_mine(state):
        return state[1] < end

    def step(state):
        item, start, carry = state
        slot = lax.div(item, layout.items_per_slot)
        sub = item - slot * layout.items_per_slot
        committed_len = lens_ref[slot]
        row_tile = lax.rem(sub, layout.num_row_tiles)
        blocks = tile_blocks(layout, committed_len, row_tile)  # the line is as long as the last tile's
        context = start + share.overhead  # where the item's context starts on the line
        part = Part(
            item=item,
            slot=slot,
            kv_head=lax.div(sub, layout.num_row_tiles),
            row_tile=row_tile,
            committed_len=committed_len,
            first=jnp.clip(begin - context, 0, blocks),
            last=jnp.clip(end - context, 0, blocks),
            first_cta=lax.div(context, share.blocks),
            last_cta=lax.div(context + jnp.maximum(blocks, 1) - 1, share.blocks),
        )
        carry = lax.cond(part.first < part.last, lambda c: body(part, c), lambda c: c, carry)
        next_item = jnp.where(blocks > 0, item + 1, (slot + 1) * layout.items_per_slot)
        return next_item, start + item_len(layout, committed_len, share.overhead), carry

    return lax.while_loop(is_mine, step, (share.item, share.item_start, init))[2]
