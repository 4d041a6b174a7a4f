"""What must hold after every operation of an engine, whatever it was asked to do.

Each check raises `CheckFailed`, with a sentence that names what does not add up, or returns None. `check_step_record`
and `check_trace` need nothing but records: they fit any engine that can say what a step did.
"""

from collections import Counter
from collections.abc import Sequence

from mtp_jax.engine.group import Group
from mtp_jax.engine.pages import NULL_PAGE, pages_for
from mtp_jax.engine.requests import StepRecord
from mtp_jax.engine.scheduler import Scheduler


class CheckFailed(AssertionError):
    """A rule of the bookkeeping does not hold."""


def check_step_record(
    record: StepRecord,
    *,
    limit: int,
    page_size: int | None = None,
    emits_target_tokens: bool = True,
    keeps_right_drafts: bool = True,
) -> None:
    """The arithmetic of one decode step of one request; by default under "match", whose tokens are the target's own.

    With `emits_target_tokens` False the tokens are the accepted drafts and one more, the target's own after a
    whole chain. With `keeps_right_drafts` False a rule may refuse drafts that are the target's tokens. `limit` is
    the committed_len at which the request is finished by length. With `page_size` the pages that the slot held
    must cover what the step wrote: positions committed_len_before..committed_len_before + number of drafts.
    Drafts of a tree (`record.parents`) must be one: parents before children, siblings different, not deeper than K.

    >>> check_step_record(
    ...     StepRecord(
    ...         draft_len=2, draft_cap=2, drafts=(4, 9), target_tokens=(4, 5, 6), num_accepted=1, emitted=(4, 5),
    ...         committed_len_before=7, committed_len_after=9, num_pages=1,
    ...     ),
    ...     limit=20,
    ...     page_size=16,
    ... )
    """
    drafts, emitted = record.drafts, record.emitted
    before, after = record.committed_len_before, record.committed_len_after
    if record.parents is None:
        require(0 <= record.draft_cap <= record.draft_len, f"a cap of {record.draft_cap} under K = {record.draft_len}")
    else:
        _check_tree(record.parents, drafts, record.draft_len)
    require(len(drafts) <= record.draft_cap, f"{len(drafts)} drafts under a cap of {record.draft_cap}")
    require(
        len(record.target_tokens) == len(drafts) + 1,
        f"{len(record.target_tokens)} target tokens for {len(drafts)} drafts; one row more than drafts is verified",
    )
    require(bool(emitted), "a live slot emitted nothing")
    if emits_target_tokens:
        _check_matched(record, keeps_right_drafts=keeps_right_drafts)
    else:
        _check_drafts_stand(record)
    require(after - before == len(emitted), f"{before} became {after} with {len(emitted)} tokens emitted")
    require(after <= limit, f"committed_len {after} passes the limit {limit}")
    require(before + len(drafts) < limit, f"drafts up to position {before + len(drafts)}, at or past the limit {limit}")
    if page_size is not None:
        needed = pages_for(before + len(drafts) + 1, page_size)
        require(record.num_pages >= needed, f"wrote into {needed} pages while the slot held {record.num_pages}")


def _check_matched(record: StepRecord, *, keeps_right_drafts: bool) -> None:
    emitted, path = record.emitted, right_path(record)
    if not keeps_right_drafts:
        path = path[: record.num_accepted + 1]
    num_right = len(path) - 1
    require(
        len(emitted) <= num_right + 1, f"{len(emitted)} tokens emitted after {num_right} right drafts and a bonus token"
    )
    require(
        emitted == tuple(record.target_tokens[row] for row in path[: len(emitted)]),
        f"emitted {emitted}, but the target says {record.target_tokens}",
    )
    require(
        record.num_accepted == min(num_right, len(emitted)),
        f"{record.num_accepted} accepted, but {num_right} drafts match and {len(emitted)} tokens were emitted",
    )


def _check_drafts_stand(record: StepRecord) -> None:
    emitted, num_accepted = record.emitted, record.num_accepted
    require(
        emitted[:num_accepted] == record.drafts[:num_accepted],
        f"emitted {emitted} with {num_accepted} drafts accepted of {record.drafts}",
    )
    require(
        num_accepted <= len(emitted) <= num_accepted + 1, f"{len(emitted)} tokens emitted with {num_accepted} accepted"
    )
    if len(emitted) == len(record.drafts) + 1:
        require(
            emitted[-1] == record.target_tokens[-1],
            f"the bonus token is {emitted[-1]}, but the target says {record.target_tokens[-1]}",
        )


def check_trace(
    records: Sequence[StepRecord],
    tokens: Sequence[int],
    *,
    prompt_len: int,
    limit: int,
    stop_ids: Sequence[int] = (),
    page_size: int | None = None,
    emits_target_tokens: bool = True,
    keeps_right_drafts: bool = True,
) -> None:
    """All decode steps of one finished request: they join without gap, and bring exactly its tokens.

    `tokens` is everything the request emitted; the first comes from the prefill, the records bring the rest.

    >>> check_trace([], [5], prompt_len=4, limit=4)
    >>> check_trace([], [5, 6], prompt_len=4, limit=5)
    Traceback (most recent call last):
    mtp_jax.testing.checks.CheckFailed: the records emitted () after the first token, the request [6]
    """
    committed_len = prompt_len
    for record in records:
        check_step_record(
            record,
            limit=limit,
            page_size=page_size,
            emits_target_tokens=emits_target_tokens,
            keeps_right_drafts=keeps_right_drafts,
        )
        require(
            record.committed_len_before == committed_len,
            f"a step began at committed_len {record.committed_len_before}, the one before ended at {committed_len}",
        )
        committed_len = record.committed_len_after
    emitted = tuple(token for record in records for token in record.emitted)
    require(
        emitted == tuple(tokens[1:]), f"the records emitted {emitted} after the first token, the request {tokens[1:]}"
    )
    require(len(tokens) <= limit - prompt_len + 1, f"{len(tokens)} tokens; the limit leaves {limit - prompt_len + 1}")
    early = [token for token in tokens[:-1] if token in stop_ids]
    require(not early, f"tokens go on after stop id {early[:1]}")


def check_pages(scheduler: Scheduler) -> None:
    """The page books: slots hold what the pool gave out, shared only as it may be, and enough for their bounds."""
    pool, page_size = scheduler.pool, scheduler.config.cache.page_size
    for slot in scheduler.slots:
        require(len(set(slot.pages)) == len(slot.pages), f"slot {slot.index} holds a page twice: {slot.pages}")
    held = Counter(page for slot in scheduler.slots for page in slot.pages)
    require(dict(held) == pool.holders, f"slots hold {dict(held)}, the pool counts {pool.holders}")
    require(
        pool.num_free + len(held) == pool.num_pages,
        f"{pool.num_free} free and {len(held)} held pages of {pool.num_pages}",
    )
    _check_sharing(scheduler)
    require(NULL_PAGE not in held, "the null page is held")
    require(all(0 < page <= pool.num_pages for page in held), f"a page is outside 1..{pool.num_pages}: {held}")
    for slot in scheduler.slots:
        covered = len(slot.pages) * page_size
        require(
            slot.known_len <= slot.min_len and slot.known_len <= slot.reserved_len,
            f"slot {slot.index}: known_len {slot.known_len} passes its bounds {slot.min_len}, {slot.reserved_len}",
        )
        require(
            covered >= min(slot.reserved_len, slot.state.limit),
            f"slot {slot.index}: pages cover {covered} positions, its bound is {slot.reserved_len}",
        )
        most = max(slot.state.limit, len(slot.prompt) + 1)
        require(
            len(slot.pages) <= pages_for(most, page_size),
            f"slot {slot.index}: {len(slot.pages)} pages for at most {most} positions",
        )


def _check_sharing(scheduler: Scheduler) -> None:
    """A page has two holders only below what either may still write: where both begin with the same tokens."""
    page_size = scheduler.config.cache.page_size
    seen: dict[int, tuple[int, ...]] = {}
    for slot in scheduler.slots:
        for place, page in enumerate(slot.pages):
            if scheduler.pool.holders[page] == 1:
                continue
            end = (place + 1) * page_size
            text = tuple(slot.prompt[:end])
            require(
                end < len(slot.prompt) + 1 and slot.prefilled >= end,
                f"slot {slot.index} shares page {page}, which it may still write",
            )
            require(seen.setdefault(page, text) == text, f"page {page} is shared by two texts")


def check_seats(group: Group) -> None:
    """Every unfinished request is in one place: seated once, in one shard, or waiting."""
    seated = [slot.state.request.request_id for shard in group.shards for slot in shard.slots]
    waiting = [state.request.request_id for state in group.waiting]
    require(len({*seated, *waiting}) == len(seated) + len(waiting), f"seated {seated} and waiting {waiting}")
    for shard in group.shards:
        indices = [slot.index for slot in shard.slots]
        require(len(set(indices)) == len(indices), f"two requests in one slot: {indices}")


def right_path(record: StepRecord) -> list[int]:
    """Rows of a step, from row 0 to the last draft that the target would have drawn too.

    >>> record = StepRecord(2, 3, (4, 9, 5), (9, 0, 5, 7), 2, (9, 5, 7), 10, 13, 1, parents=(0, 0, 2))
    >>> right_path(record), [record.target_tokens[row] for row in right_path(record)]
    ([0, 2, 3], [9, 5, 7])
    """
    parents = range(len(record.drafts)) if record.parents is None else record.parents
    path = [0]
    for row, (parent, draft) in enumerate(zip(parents, record.drafts, strict=True), start=1):
        if parent == path[-1] and draft == record.target_tokens[parent]:
            path.append(row)
    return path


def _check_tree(parents: Sequence[int], drafts: Sequence[int], draft_len: int) -> None:
    require(len(parents) == len(drafts), f"{len(drafts)} drafts with {len(parents)} parents")
    depth = [0]
    for row, parent in enumerate(parents, start=1):
        require(0 <= parent < row, f"draft {row - 1} hangs on row {parent}, which does not come before it")
        depth.append(depth[parent] + 1)
    require(max(depth) <= draft_len, f"drafts {max(depth)} deep under K = {draft_len}")
    siblings = list(zip(parents, drafts, strict=True))
    require(len(set(siblings)) == len(siblings), f"two drafts after one row are the same: {siblings}")


def require(holds: bool, sentence: str) -> None:
    """Raises `CheckFailed` with this sentence unless it holds: for checks of your own."""
    if not holds:
        raise CheckFailed(sentence)
