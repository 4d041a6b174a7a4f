"""How a user may ask to draft and to accept. Frozen, hashable, free of jax; what cannot be together is refused."""

# pyright: reportUnnecessaryIsInstance=false
# What a user passes need not have the type it is annotated with; these checks are what says so.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from mtp_jax.core.errors import ConfigError
from mtp_jax.core.requirements import is_real, require_choice, require_int, require_name
from mtp_jax.core.rule_facts import RULE_FACTS, facts_of
from mtp_jax.core.topology import CHAIN, DEFAULT_TREE_TOPK, Topology, Tree

NEAR_LIMIT_RULES = ("row_cap", "group_zero")
DRAFT_SAMPLINGS = ("coupled", "greedy", "probabilistic")
TREE_METHOD = "dynamic_tree"
_ACCEPTANCE_WINDOW = 256
MAX_DRAFT_LEN = 7
"""Verification handles up to 8 rows a slot: attention kernels are written for W = 1..8."""


class _Unasked(int):
    """A default that can be told from the same number given by a user."""


class _UnaskedName(str):
    """A default that can be told from the same name given by a user."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to draft and how to accept. `method=None` is plain decoding, and goes with no other field.

    `method`: "mtp" (of a model with one MTP layer "mtp_eagle", with several "mtp_vanilla"), "mtp_eagle" (the first MTP
    layer, applied again and again), "mtp_vanilla" (a layer for each draft), "eagle3", "ngram" (copies from the text so
    far), "ngram_mtp" (MTP layers where nothing was found) or "dynamic_tree".
    `model` is the folder of the drafter's checkpoint for methods that take one ("eagle3", "dynamic_tree").
    `num_speculative_tokens` is Kmax. `draft_len_schedule` maps batch size to K for `policy="schedule"`: keys are
    inclusive upper bounds, the first entry must give Kmax, beyond the last key K is 0.
    Less than `disable_below_acceptance` of the last `acceptance_window` first drafts kept turns drafting off, under any
    policy, until probes find them kept again; None never does.
    `policy` chooses each step's K: "fixed", "schedule" or "goodput". `near_limit`: where a request comes near the
    longest text it alone drafts less ("row_cap"), or the whole mesh drafts nothing ("group_zero").
    `acceptance`: "match" (every token is plain decoding's own) or "rejection" (every token follows plain decoding's
    law), which `block_verification` makes keep more drafts. `draft_sampling` follows it unless given: "coupled" with
    "match", "probabilistic" with "rejection"; "greedy" goes with both.
    "relaxed" is lossy: between a request's `thinking_token_ids` it also keeps drafts among the `relaxed_topk` likeliest
    tokens (10) whose probability is at most `relaxed_delta` (0.6) below the best one's.
    `synthetic_acceptance`, for benchmarks: forces draft k to stand, with all before it, in so large a share of the
    steps that verify it (vLLM's meaning: one share a draft position, none above the one before). The text is then not
    the model's, and outputs say so (`is_lossy`).
    `draft_vocab_size`: MTP layers draft among so many of the most frequent tokens, by the ranking beside the weights.
    `prompt_lookup_min`, `prompt_lookup_max`: how many of the last tokens "ngram" looks up (2 to 5 by default; from 5 on
    "ngram_mtp" prefers what it finds to the MTP layers' drafts).
    `method="dynamic_tree"`: Kmax is the depth of a tree of `tree_nodes` drafts (topk * Kmax by default), in which each
    node has `tree_topk` continuations (4 by default). Of a model's MTP layers a tree uses the first alone.
    Raises `ConfigError` for a field that cannot be honoured, or that would be ignored.

    >>> SpeculativeConfig(acceptance="rejection").draft_sampling
    'probabilistic'
    >>> SpeculativeConfig(policy="schedule", draft_len_schedule={4: 3, 16: 1}).num_speculative_tokens
    3
    >>> SpeculativeConfig(method=None, policy="goodput")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mtp_jax.core.errors.ConfigError: policy is 'goodput', and method=None is plain decoding, which does not draft; ...
    """

    method: str | None = "mtp"
    model: str | Path | None = None
    num_speculative_tokens: int = _Unasked(3)
    policy: str = "fixed"
    draft_len_schedule: Mapping[int, int] | None = None
    disable_below_acceptance: float | None = None
    acceptance_window: int = _Unasked(_ACCEPTANCE_WINDOW)
    near_limit: str = "row_cap"
    acceptance: str = "match"
    draft_sampling: str = _UnaskedName("coupled")
    block_verification: bool = False
    relaxed_topk: int | None = None
    relaxed_delta: float | None = None
    synthetic_acceptance: Sequence[float] | None = None
    draft_vocab_size: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    tree_topk: int | None = None
    tree_nodes: int | None = None

    def __post_init__(self) -> None:
        # Variants are named here and known to their tables alone, so that one more is one line there.
        require_name("method", self.method, or_none=True)
        if isinstance(self.model, Path):
            object.__setattr__(self, "model", str(self.model))
        require_name("model", self.model, or_none=True)
        require_name("policy", self.policy)
        require_choice("near_limit", self.near_limit, NEAR_LIMIT_RULES)
        require_name("acceptance", self.acceptance)
        if isinstance(self.draft_sampling, _UnaskedName):
            following = facts_of(self.acceptance).draft_samplings[0]
            object.__setattr__(self, "draft_sampling", _UnaskedName(following))
        require_choice("draft_sampling", self.draft_sampling, DRAFT_SAMPLINGS)
        require_int("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFT_LEN)
        if self.method is None:
            self._check_plain()
        is_plain = self.method is None
        object.__setattr__(self, "num_speculative_tokens", 0 if is_plain else int(self.num_speculative_tokens))
        self._check_gate()
        self._check_acceptance()
        self._check_lookup()
        if self.draft_vocab_size is not None:
            require_int("draft_vocab_size", self.draft_vocab_size, 1, None)
        if (self.draft_len_schedule is not None) != (self.policy == "schedule"):
            raise ConfigError('draft_len_schedule goes with policy="schedule", and that policy needs it.')
        if self.draft_len_schedule is not None:
            if not isinstance(self.draft_len_schedule, Mapping):
                raise ConfigError(
                    f"draft_len_schedule is {self.draft_len_schedule!r}; it must map batch sizes to draft lengths."
                )
            object.__setattr__(self, "draft_len_schedule", FrozenMap(self.draft_len_schedule))
            self._check_schedule(self.draft_len_schedule)
        for name in ("tree_topk", "tree_nodes"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1, None)
        _ = self.topology  # refuses trees that cannot be

    @cached_property
    def topology(self) -> Topology:
        """What the drafts of a step hang on. The one method known by name here: it changes what the host reserves."""
        if self.method != TREE_METHOD:
            return CHAIN
        topk = DEFAULT_TREE_TOPK if self.tree_topk is None else self.tree_topk
        nodes = topk * self.num_speculative_tokens if self.tree_nodes is None else self.tree_nodes
        return Tree(self.num_speculative_tokens, topk, nodes)

    def _check_plain(self) -> None:
        """Raises `ConfigError` for a field that plain decoding would ignore."""
        for each in fields(self):
            value = getattr(self, each.name)
            is_left_open = isinstance(value, _Unasked | _UnaskedName)
            if isinstance(each.default, _Unasked):
                is_asked_for = not is_left_open and value != 0  # to draft nothing is what plain decoding does
            else:
                is_asked_for = not is_left_open and (value != each.default or isinstance(each.default, _UnaskedName))
            if each.name != "method" and is_asked_for:
                raise ConfigError(
                    f"{each.name} is {value!r}, and method=None is plain decoding, which does not draft; leave it out."
                )

    def _check_gate(self) -> None:
        threshold = self.disable_below_acceptance
        require_int("acceptance_window", self.acceptance_window, 1, None)
        if threshold is not None and not (is_real(threshold) and 0 < threshold <= 1):
            raise ConfigError(
                f"disable_below_acceptance is {threshold!r}; it must be None or a number above 0 and at most 1."
            )
        if threshold is None and self.acceptance_window != _ACCEPTANCE_WINDOW:
            raise ConfigError(
                f"acceptance_window is {self.acceptance_window}, and nothing looks at it without "
                "disable_below_acceptance; set that too."
            )

    def _check_lookup(self) -> None:
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        for name, value in (("prompt_lookup_min", shortest), ("prompt_lookup_max", longest)):
            if value is not None:
                require_int(name, value, 1, None)
        if shortest is not None and longest is not None and shortest > longest:
            raise ConfigError(
                f"prompt_lookup_min is {shortest} and prompt_lookup_max {longest}; the first must not be the larger."
            )

    def _check_acceptance(self) -> None:
        allowed = facts_of(self.acceptance).draft_samplings
        if self.draft_sampling not in allowed:
            raise ConfigError(
                f"draft_sampling is {self.draft_sampling!r}, and acceptance={self.acceptance!r} takes "
                f"{' or '.join(map(repr, allowed))} drafts."
            )
        if not isinstance(self.block_verification, bool):
            raise ConfigError(f"block_verification is {self.block_verification!r}; it must be True or False.")
        for rule, facts in RULE_FACTS.items():
            for name in facts.options:
                value = getattr(self, name)
                if rule != self.acceptance and value is not None and value is not False:
                    raise ConfigError(f'{name} goes with acceptance="{rule}", not {self.acceptance!r}.')
        if self.relaxed_topk is not None:
            require_int("relaxed_topk", self.relaxed_topk, 1, None)
        if self.relaxed_delta is not None and not (is_real(self.relaxed_delta) and 0 <= self.relaxed_delta <= 1):
            raise ConfigError(f"relaxed_delta is {self.relaxed_delta!r}; it must be a number from 0 to 1.")
        if self.synthetic_acceptance is not None:
            self._check_synthetic(self.synthetic_acceptance)

    def _check_synthetic(self, shares: Sequence[float]) -> None:
        if not isinstance(shares, list | tuple) or not all(is_real(share) and 0 <= share <= 1 for share in shares):
            raise ConfigError(
                f"synthetic_acceptance is {shares!r}; it must be a list of numbers from 0 to 1, one a draft position."
            )
        if len(shares) != self.num_speculative_tokens:
            raise ConfigError(
                f"synthetic_acceptance has {len(shares)} entries; num_speculative_tokens={self.num_speculative_tokens} "
                "needs as many."
            )
        if any(later > earlier for earlier, later in pairwise(shares)):
            raise ConfigError(
                f"synthetic_acceptance is {shares!r}; no entry may be above the one before: a draft stands only if all "
                "before it do."
            )
        if self.block_verification:
            raise ConfigError("block_verification does nothing under synthetic_acceptance; leave one of them out.")
        if facts_of(self.acceptance).keeps == "neither":
            raise ConfigError(
                f'acceptance="{self.acceptance}" does nothing under synthetic_acceptance; leave one of them out.'
            )
        object.__setattr__(self, "synthetic_acceptance", tuple(float(share) for share in shares))

    def limited_to(self, max_draft_len: int) -> "SpeculativeConfig":
        """The same with a shorter Kmax; draft lengths of a schedule and forced shares past it go.

        >>> SpeculativeConfig(policy="schedule", draft_len_schedule={4: 3, 16: 1}).limited_to(2).draft_len_schedule
        {4: 2, 16: 1}
        """
        schedule, shares = self.draft_len_schedule, self.synthetic_acceptance
        if schedule is not None:
            schedule = {size: min(draft_len, max_draft_len) for size, draft_len in schedule.items()}
        return replace(
            self,
            num_speculative_tokens=max_draft_len,
            draft_len_schedule=schedule,
            synthetic_acceptance=None if shares is None else tuple(shares)[:max_draft_len],
        )

    def asked(self, name: str) -> Any:
        """A field's value if the user gave one; None where it was left open."""
        value = getattr(self, name)
        return None if isinstance(value, _Unasked | _UnaskedName) else value

    @property
    def is_lossy(self) -> bool:
        """Whether tokens may be written that plain decoding would not write, or not as often."""
        return self.keeps == "neither"

    @property
    def keeps(self) -> Literal["tokens", "law", "neither"]:
        """What of plain decoding is kept whatever is drafted: its very tokens, their law, or neither."""
        return facts_of(self.acceptance).keeps if self.synthetic_acceptance is None else "neither"

    def _check_schedule(self, schedule: Mapping[int, int]) -> None:
        if not schedule:
            raise ConfigError("draft_len_schedule is empty; it needs at least one {batch size: draft length} entry.")
        for batch_size, draft_len in schedule.items():
            require_int("a batch size in draft_len_schedule", batch_size, 1, None)
            require_int(f"draft_len_schedule[{batch_size}]", draft_len, 0, self.num_speculative_tokens)
        first = min(schedule)
        if schedule[first] != self.num_speculative_tokens:
            raise ConfigError(
                f"draft_len_schedule[{first}] is {schedule[first]}; the first entry must give "
                f"num_speculative_tokens={self.num_speculative_tokens}."
            )


class FrozenMap(dict[int, int]):
    """A mapping that can be part of a hashable config."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))

    def __setitem__(self, key: int, value: int) -> None:
        raise TypeError("a configuration cannot be changed")


PLAIN = SpeculativeConfig(method=None, num_speculative_tokens=0)
"""Plain decoding: no drafter, no drafts."""
