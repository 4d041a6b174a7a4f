"""Queues, admission, preemption, the step decision, reconciliation. Host facts only: no jax, no device values."""

from collections import deque
from dataclasses import dataclass, field

from mtp_jax.core.config import EngineConfig
from mtp_jax.core.errors import InvariantError
from mtp_jax.core.shapes import PrefillShape, Shape, ShapeGrid, StepShape
from mtp_jax.engine.decisions import Decision, PrefillDecision, SlotDecision, StepDecision
from mtp_jax.engine.outcomes import Outcome, outcome_of
from mtp_jax.engine.pages import OutOfPages, PagePool, pages_for
from mtp_jax.engine.prefixes import PrefixPages
from mtp_jax.engine.requests import Progress, Request, RequestState, RequestStatus, StepRecord, add_per_position
from mtp_jax.engine.results import SlotResult, StepResult
from mtp_jax.engine.slots import Slot, SlotTable
from mtp_jax.engine.vote import LaunchNeeds, Wish
from mtp_jax.policies.api import DraftLenPolicy, PolicyView, StepStats, wish


@dataclass
class Totals:
    """Counters over the engine's life; `LLM.get_metrics` shows them under vLLM's names."""

    num_drafts: int = 0  # slot-steps that drafted
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list[int])
    num_draft_tokens_per_pos: list[int] = field(default_factory=list[int])
    num_slot_steps: int = 0
    num_emitted_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0  # tokens to prefill of requests that were seated, once more where they are resumed
    num_prefix_hits: int = 0  # of these, tokens in pages that were there already


class Scheduler:
    """One data shard's books: decides its part of each launch from bounds, settles results by the records they carry.

    Shards of one process share `waiting` and `totals` (see `engine.group`). `lookahead`: the proposer's.
    """

    def __init__(
        self,
        config: EngineConfig,
        grid: ShapeGrid,
        policy: DraftLenPolicy,
        *,
        lookahead: int = 0,
        waiting: deque[RequestState] | None = None,
        totals: Totals | None = None,
    ) -> None:
        self.config = config
        self.grid = grid
        self.policy = policy
        self.pool = PagePool(config.pages_per_shard)
        self.prefixes = PrefixPages(self.pool, config.cache.page_size, lookahead)
        self.slots = SlotTable(config.slots_per_shard)
        self.waiting: deque[RequestState] = deque() if waiting is None else waiting
        self.totals = Totals() if totals is None else totals
        self._topology = config.topology
        self._is_starved = False  # a slot sat out for want of pages: nobody new is admitted meanwhile

    # ---- requests in and out

    @property
    def has_work(self) -> bool:
        """Some request is not finished."""
        return bool(self.waiting) or len(self.slots) > 0

    def limit_of(self, request: Request) -> int:
        """The committed_len at which the request is finished by length; its last token needs no KV."""
        return request.longest_text(self.config.max_model_len) - 1

    def submit(self, request: Request) -> RequestState:
        """Queues an admissible request (see `engine.admission`)."""
        state = RequestState(request, self.limit_of(request))
        self.waiting.append(state)
        return state

    def cancel(self, request_id: str) -> bool:
        """Drops a request; what is still in flight for it is ignored when it arrives. False if it is not here."""
        for state in self.waiting:
            if state.request.request_id == request_id:
                self.waiting.remove(state)
                state.status = RequestStatus.FINISHED
                return True
        slot = self.slots.of_request(request_id)
        if slot is None:
            return False
        self._release(slot)
        slot.state.status = RequestStatus.FINISHED
        return True

    def preempt(self, slot: Slot) -> None:
        """Takes a running request off the device; it resumes from its known tokens, first in the queue."""
        self._release(slot)
        slot.state.status = RequestStatus.WAITING
        slot.state.metrics.num_preemptions += 1
        self.totals.num_preemptions += 1
        self.waiting.appendleft(slot.state)

    def admit_next(self) -> bool:
        """Seats the first request in the queue, with pages for its prompt; False if that cannot be done now."""
        self._is_starved = self._is_starved and bool(self._decoding())
        if not self.waiting or not self.slots.has_free or self._is_starved:
            return False
        state = self.waiting[0]
        num_pages = pages_for(min(len(state.known_tokens) + 1, state.limit), self.config.cache.page_size)
        keys = self._shareable(state)
        shared = self.prefixes.find(keys)
        self.pool.share(shared)
        try:
            pages = self.pool.take(num_pages - len(shared))
        except OutOfPages:
            self.pool.give_back(shared)
            return False
        self.waiting.popleft()
        state.status = RequestStatus.RUNNING
        slot = self.slots.seat(state, [*shared, *pages])
        slot.page_keys = keys
        slot.prefilled = len(shared) * self.config.cache.page_size
        return True

    def _shareable(self, state: RequestState) -> tuple[bytes, ...]:
        """Keys of the pages that the request may find filled; none if each of its prompt's tokens is to be scored."""
        if not self.config.cache.prefix_caching or state.request.params.prompt_logprobs is not None:
            return ()
        tokens = state.known_tokens
        if state.num_keyed != len(tokens):  # not again for each launch that it waits for pages
            state.num_keyed, state.page_keys = len(tokens), self.prefixes.keys(tokens)
        return state.page_keys

    def find_prefix(self) -> None:
        """Looks again for pages of the prompt that is next: requests seated together may begin alike.

        To be called before each launch. What the first of them has launched by then the others need not compute.
        """
        slot = next(iter(self._prefilling()), None)
        if slot is None or slot.has_launched:
            return
        num_known = slot.prefilled // self.config.cache.page_size
        found = self.prefixes.find(slot.page_keys)[num_known:]
        self.pool.share(found)
        replaced = slice(num_known, num_known + len(found))
        self.pool.give_back(slot.pages[replaced])
        slot.pages[replaced] = found
        slot.prefilled += len(found) * self.config.cache.page_size

    def _release(self, slot: Slot) -> None:
        """Gives seat and pages back at once: launches run in order, so a late write comes before the next owner's."""
        self.slots.vacate(slot)
        self.pool.give_back(slot.pages)

    def _decoding(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.is_prefilled and slot.remaining > 0]

    def _prefilling(self) -> list[Slot]:
        """Slots with prompt tokens to launch, in the order in which they will be."""
        return sorted((slot for slot in self.slots if not slot.is_prefilled), key=lambda slot: slot.admission)

    # ---- the wish

    def wish(self, *, num_ahead: int, num_prefills_coming: int, step_number: int, group_bucket: int = 1) -> Wish:
        """What this shard wants of the step after `num_ahead` launches whose shapes it does not know yet.

        0 ahead: of the very next one. `num_prefills_coming` of those launches are prefills by its own earlier wishes.
        `group_bucket`: slots of the decode program that ran last, which the largest shard had need of.
        """
        decoding, prefilling = self._decoding(), self._prefilling()
        to_decode = decoding if num_ahead == 0 else [*decoding, *prefilling]
        each = [slot.needs for slot in self.slots]
        needs = {
            "whole_logits": any(one.whole_logits for one in each),
            "logprobs": any(one.logprobs for one in each),
            "prompt_logprobs": any(one.prompt_logprobs for one in each),
        }
        if not to_decode:
            return Wish(self.has_work, chunk=self._next_chunk(num_prefills_coming), **needs)
        num_slots = 1 + max(slot.index for slot in to_decode)
        longest = self.config.max_draft_len
        if self.config.speculative.near_limit == "group_zero" and any(
            self._is_near_limit(slot, num_ahead) for slot in to_decode
        ):
            longest = 0
        elif self.policy.is_voted:
            bucket = max(self.grid.choose(num_slots, longest).slots, group_bucket)
            view = PolicyView(max(len(decoding), 1), bucket, longest, step_number)
            longest = wish(self.policy, view)
        return Wish(
            alive=True,
            num_slots=num_slots,
            chunk=self._next_chunk(num_prefills_coming),
            draft_len=longest,
            # A slot with r tokens to go can use r - 1 drafts; when nobody can use more, a shorter program does as well.
            useful_drafts=max(self._longest_draft(slot) for slot in to_decode),
            num_decoding=len(decoding) + min(num_prefills_coming, len(prefilling)),
            **needs,
        )

    def _next_chunk(self, num_prefills_coming: int) -> int:
        """Tokens of the prefill that would come after those under way; 0 if they are enough."""
        largest = self.grid.chunk_buckets[-1]
        for slot in self._prefilling():
            left = len(slot.prompt) - slot.prefilled
            num_chunks = -(-left // largest)
            if num_chunks > num_prefills_coming:
                return min(left - num_prefills_coming * largest, largest)
            num_prefills_coming -= num_chunks
        return 0

    def _longest_draft(self, slot: Slot) -> int:
        """In a tree a path: how deep it may be."""
        remaining = slot.remaining if slot.is_prefilled else slot.state.limit - len(slot.prompt)
        return min(max(remaining - 1, 0), self.config.max_draft_len)

    def _is_near_limit(self, slot: Slot, num_ahead: int) -> bool:
        """Whether a whole step may not fit below max_model_len, by the bound after `num_ahead` more steps."""
        longest, topology = self.config.max_draft_len, self._topology
        num_drafts = topology.num_drafts(longest)
        start = slot.reserved_len if slot.is_prefilled else len(slot.prompt)
        bound = min(start + num_ahead * topology.max_emitted(longest, num_drafts), slot.state.limit)
        return bound + topology.num_positions(longest, num_drafts) > self.config.max_model_len

    # ---- the decision

    def decide_within(self, shape: Shape, number: int, needs: LaunchNeeds) -> Decision | None:
        """This shard's part in launch `number` of what was agreed: as much of it as it can use, never more."""
        if isinstance(shape, PrefillShape):
            prefilling = [slot for slot in self._prefilling() if needs.cover(slot.needs)]
            return self._decide_prefill(prefilling[0], shape, number) if prefilling else None
        return self._decide_decode(shape, number, needs)

    def _decide_prefill(self, slot: Slot, shape: PrefillShape, number: int) -> PrefillDecision:
        left = len(slot.prompt) - slot.prefilled
        num_tokens = min(left, shape.chunk)
        request = slot.state.request
        wants_scores = request.params.prompt_logprobs is not None
        decision = PrefillDecision(
            number=number,
            shape=shape,
            slot=slot.index,
            admission=slot.admission,
            start=slot.prefilled,
            num_tokens=num_tokens,
            is_first=not slot.has_launched,
            is_last=num_tokens == left,
            wants_logprobs=request.params.logprobs is not None,
            scored=request.prompt[slot.prefilled + 1 :][:num_tokens] if wants_scores else (),
        )
        if not slot.has_launched:
            if slot.pending_token is None:  # what a resumed request finds may be its own
                slot.state.metrics.num_cached_tokens = slot.prefilled
            self.totals.num_prefix_queries += len(slot.prompt)
            self.totals.num_prefix_hits += slot.prefilled
        slot.launched_prefill(num_tokens)
        num_written = slot.prefilled // self.config.cache.page_size
        keys = slot.page_keys[:num_written]
        self.prefixes.publish(keys, slot.pages[: len(keys)])
        return decision

    def _decide_decode(self, shape: StepShape, number: int, needs: LaunchNeeds) -> StepDecision | None:
        fitting = [slot for slot in self._decoding() if self._fits(slot, shape, needs)]
        decided: list[SlotDecision] = []
        for slot in sorted(fitting, key=lambda slot: slot.admission):
            cap = self._reserve(slot, shape.draft_len)
            if cap is None:
                continue
            decided.append(self._part_of(slot, shape.draft_len, cap))
            slot.launched_decode(decided[-1].max_emitted)
        self._is_starved = len(decided) < len(fitting)
        if decided:
            return StepDecision(number, shape, tuple(decided))
        if self._is_starved and all(slot.num_in_flight == 0 for slot in self.slots):
            self._preempt_newest()
            return self._decide_decode(shape, number, needs)
        return None

    def _fits(self, slot: Slot, shape: StepShape, needs: LaunchNeeds) -> bool:
        """Whether the slot may take part: one that came after the vote may be outside of what was agreed."""
        if slot.index >= shape.slots or not needs.cover(slot.needs):
            return False
        is_group_zero = self.config.speculative.near_limit == "group_zero"
        return shape.draft_len == 0 or not (is_group_zero and self._is_near_limit(slot, 0))

    def _preempt_newest(self) -> None:
        newest = max(self.slots, key=lambda slot: slot.admission)
        if len(self.slots) == 1:
            raise InvariantError("one request alone ran out of pages although admission checked that it fits")
        self.preempt(newest)

    def _reserve(self, slot: Slot, draft_len: int) -> int | None:
        """The slot's cap: the most drafts that it can use and has pages for. None: not even the pending token fits."""
        page_size = self.config.cache.page_size
        most = min(self._topology.num_drafts(draft_len), slot.remaining - 1)
        for cap in range(most, -1, -1):
            end = slot.reserved_len + self._topology.num_positions(draft_len, cap)
            wanted = pages_for(min(end, slot.state.limit), page_size)
            try:
                slot.pages.extend(self.pool.take(max(wanted - len(slot.pages), 0)))
            except OutOfPages:
                continue
            return cap
        return None

    def _part_of(self, slot: Slot, draft_len: int, cap: int) -> SlotDecision:
        return SlotDecision(
            slot=slot.index,
            admission=slot.admission,
            draft_cap=cap,
            max_emitted=self._topology.max_emitted(draft_len, cap),
            num_positions=self._topology.num_positions(draft_len, cap),
            num_pages=len(slot.pages),
            wants_logprobs=slot.state.request.params.logprobs is not None,
        )

    # ---- reconciliation

    def reconcile(self, result: StepResult) -> list[Progress]:
        """Settles one launch's results, by its own record: a slot that changed hands since is left alone."""
        if isinstance(result.decision, PrefillDecision):
            return self._reconcile_prefill(result.decision, result.slots[0])
        progress: list[Progress] = []
        drafted: list[int] = []
        accepted: list[int] = []
        for decided, slot_result in zip(result.decision.slots, result.slots, strict=True):
            slot = self.slots.find(decided.slot, decided.admission)
            if slot is None:
                continue
            _check_result(slot, decided, slot_result)
            slot.reconciled_decode(decided.max_emitted, len(slot_result.tokens), slot_result.committed_len)
            add_per_position(drafted, slot_result.draft_depth)
            add_per_position(accepted, slot_result.num_accepted)
            outcome = outcome_of(slot.state.request, slot_result)
            self._count(slot, result.decision, decided, outcome.kept)
            progress.append(self._emit(slot, outcome))
        accepted.extend([0] * (len(drafted) - len(accepted)))
        shape = result.decision.shape
        stats = StepStats(shape.slots, shape.draft_len, tuple(drafted), tuple(accepted), result.elapsed_s)
        self.policy = self.policy.update(stats)
        return progress

    def _reconcile_prefill(self, decision: PrefillDecision, slot_result: SlotResult) -> list[Progress]:
        slot = self.slots.find(decision.slot, decision.admission)
        if slot is None:
            return []
        slot.state.take_prompt_logprobs(decision.start + 1, slot_result.prompt_logprobs)
        if not decision.is_last or slot.pending_token is not None:
            return []
        return [self._emit(slot, outcome_of(slot.state.request, slot_result))]

    def _count(self, slot: Slot, decision: StepDecision, decided: SlotDecision, result: SlotResult) -> None:
        num_drafted, num_accepted = result.num_drafted, result.num_accepted
        slot.state.metrics.count_step(decision.shape.draft_len, num_drafted, num_accepted, result.draft_depth)
        totals = self.totals
        totals.num_slot_steps += 1
        totals.num_drafts += num_drafted > 0
        totals.num_draft_tokens += num_drafted
        totals.num_accepted_tokens += num_accepted
        add_per_position(totals.num_draft_tokens_per_pos, result.draft_depth)
        add_per_position(totals.num_accepted_tokens_per_pos, num_accepted)
        if slot.state.request.wants_trace:
            slot.state.records.append(
                StepRecord(
                    draft_len=decision.shape.draft_len,
                    draft_cap=decided.draft_cap,
                    drafts=result.drafts[:num_drafted],
                    parents=None if result.parents is None else result.parents[:num_drafted],
                    target_tokens=result.target_tokens[: num_drafted + 1],
                    num_accepted=num_accepted,
                    emitted=result.tokens,
                    committed_len_before=result.committed_len - len(result.tokens),
                    committed_len_after=result.committed_len,
                    num_pages=decided.num_pages,
                    launch=decision.number,
                )
            )

    def _emit(self, slot: Slot, outcome: Outcome) -> Progress:
        state, kept = slot.state, outcome.kept
        state.tokens.extend(kept.tokens)
        state.logprobs.extend(kept.logprobs)
        self.totals.num_emitted_tokens += len(kept.tokens)
        if outcome.finish_reason is not None:
            state.status = RequestStatus.FINISHED
            self._release(slot)
        return Progress(
            state.request.request_id, kept.tokens, state, outcome.finish_reason, outcome.stop_reason, outcome.error
        )


def _check_result(slot: Slot, decided: SlotDecision, result: SlotResult) -> None:
    num_drafted, depth = result.num_drafted, result.draft_depth
    if not 0 <= result.num_accepted <= depth <= num_drafted <= decided.draft_cap or not result.tokens:
        raise InvariantError(
            f"slot {slot.index}: {result.num_accepted} accepted of {num_drafted} drafts {depth} deep, "
            f"{len(result.tokens)} tokens, under a cap of {decided.draft_cap}"
        )
