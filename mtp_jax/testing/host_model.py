"""A Hypothesis state machine over `HostModel`: requests, steps, preemptions and cancellations in any order.

    from mtp_jax.testing.host_model import HostMachine
    TestHost = HostMachine.TestCase

Any rule of the books that breaks raises `CheckFailed` (or the engine's `InvariantError`), shrunk to a short program.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mtp_jax.core.config import CacheConfig, EngineConfig, SpeculativeConfig
from mtp_jax.engine.pages import pages_for
from mtp_jax.testing.fake_device import HostModel, numbered_request

_MAX_MODEL_LEN = 24


def _speculative(max_draft_len: int, tree: tuple[int, int] | None, near_limit: str) -> SpeculativeConfig:
    if tree is None or max_draft_len == 0:
        return SpeculativeConfig(num_speculative_tokens=max_draft_len, near_limit=near_limit)
    topk, num_more = tree
    most = topk + (max_draft_len - 1) * topk**2
    return SpeculativeConfig(
        method="dynamic_tree",
        num_speculative_tokens=max_draft_len,
        near_limit=near_limit,
        tree_topk=topk,
        tree_nodes=min(max_draft_len + num_more, most),
    )


class HostMachine(RuleBasedStateMachine):
    """Few slots, few pages, short limits: every edge is near."""

    host: HostModel

    @initialize(
        depth=st.integers(0, 2),
        page_size=st.sampled_from((1, 3, 4, 16)),
        max_draft_len=st.integers(0, 4),
        tree=st.none() | st.tuples(st.integers(1, 3), st.integers(0, 8)),
        num_slots=st.integers(1, 3),
        num_spare_pages=st.integers(0, 8),
        near_limit=st.sampled_from(("row_cap", "group_zero")),
        chunk=st.sampled_from((1, 4, 64)),
        lookahead=st.integers(0, 3),
    )
    def start(
        self,
        depth: int,
        page_size: int,
        max_draft_len: int,
        tree: tuple[int, int] | None,
        num_slots: int,
        num_spare_pages: int,
        near_limit: str,
        chunk: int,
        lookahead: int,
    ) -> None:
        """An engine's books; the pool holds one request of full length and `num_spare_pages` more.

        `tree`: (topk, nodes beyond the depth, as far as such a tree has them); None: chains.
        """
        self.num_requests = 0
        self.host = HostModel(
            EngineConfig(
                max_model_len=_MAX_MODEL_LEN,
                max_num_seqs=num_slots,
                cache=CacheConfig(
                    page_size=page_size, num_pages=pages_for(_MAX_MODEL_LEN, page_size) + num_spare_pages
                ),
                speculative=_speculative(max_draft_len, tree, near_limit),
                prefill_chunk=chunk,
                readback_depth=depth,
            ),
            lookahead=lookahead,
        )

    @rule(
        prompt_len=st.integers(1, _MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, 20),
        stop_after=st.none() | st.integers(0, 12),
        text=st.sampled_from((0, 1, 20, 60)),
    )
    def submit(self, prompt_len: int, max_tokens: int, stop_after: int | None, text: int) -> None:
        """One more request; those of one text share the pages of their prompts.

        Texts 20 and 60 are text 0 from its ninth and fifth token on: pages that are alike, but not what stands before.
        """
        number = 100 * self.num_requests + text
        request = numbered_request(number, prompt_len=prompt_len, max_tokens=max_tokens, stop_after=stop_after)
        self.host.submit(request)
        self.num_requests += 1

    @precondition(lambda self: self.host.scheduler.has_work)
    @rule(draft_len=st.integers(0, 4), num_right=st.lists(st.integers(0, 4), min_size=1, max_size=3))
    def step(self, draft_len: int, num_right: list[int]) -> None:
        """One turn of the loop, with any draft length and any acceptance."""
        self.host.step(min(draft_len, self.host.config.max_draft_len), num_right)

    @precondition(lambda self: len(self.host.scheduler.slots) > 0)
    @rule(which=st.integers(0, 2))
    def preempt(self, which: int) -> None:
        """Takes one running request off the device."""
        slots = list(self.host.scheduler.slots)
        self.host.preempt(slots[which % len(slots)].state.request.request_id)

    @precondition(lambda self: self.host.scheduler.has_work)
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        """Drops one request that is running or waiting."""
        unfinished = sorted(set(self.host.requests) - set(self.host.finished))
        self.host.cancel(unfinished[which % len(unfinished)])

    @invariant()
    def books_balance(self) -> None:
        """After every operation."""
        self.host.check()

    def teardown(self) -> None:
        """Everybody comes to an end, with the right tokens, and every page comes back."""
        if hasattr(self, "host"):
            self.host.finish()
