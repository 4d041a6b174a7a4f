"""What a user may ask for. Frozen, hashable, free of jax; every bound is checked once, at start or at admission."""

# pyright: reportUnnecessaryIsInstance=false
# What a user passes need not have the type it is annotated with; these checks are what says so.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from mtp_jax.core.errors import ConfigError
from mtp_jax.core.layout import ListSizes
from mtp_jax.core.sampling_params import SamplingParams as SamplingParams
from mtp_jax.core.sampling_params import is_int, is_real
from mtp_jax.core.topology import CHAIN, DEFAULT_TREE_TOPK, Topology, Tree

NEAR_LIMIT_RULES = ("row_cap", "group_zero")
DRAFT_SAMPLINGS = ("coupled", "greedy", "probabilistic")
TREE_METHOD = "dynamic_tree"
_ACCEPTANCE_WINDOW = 256
MAX_DRAFT_LEN = 7
"""Verification handles up to 8 rows a slot: attention kernels are written for W = 1..8."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    REJECTED = "rejected"


class _Unasked(int):
    """A default that can be told from the same number given by a user."""


class _UnaskedName(str):
    """A default that can be told from the same name given by a user."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to draft and how to accept. `method=None` is plain decoding, and goes with no other field.

    `model` is the folder of the drafter's checkpoint for methods that take one ("eagle3", "dynamic_tree").
    `num_speculative_tokens` is Kmax. `draft_len_schedule` maps batch size to K for `policy="schedule"`: keys are
    inclusive upper bounds, the first entry must give Kmax, beyond the last key K is 0.
    Less than `disable_below_acceptance` of the last `acceptance_window` first drafts kept turns drafting off, under any
    policy, until probes find them kept again; None never does.
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
    node has `tree_topk` continuations (4 by default).
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
        _require_name("method", self.method, or_none=True)
        if isinstance(self.model, Path):
            object.__setattr__(self, "model", str(self.model))
        _require_name("model", self.model, or_none=True)
        _require_name("policy", self.policy)
        _require_choice("near_limit", self.near_limit, NEAR_LIMIT_RULES)
        _require_name("acceptance", self.acceptance)
        if isinstance(self.draft_sampling, _UnaskedName):
            following = "probabilistic" if self.acceptance == "rejection" else "coupled"
            object.__setattr__(self, "draft_sampling", _UnaskedName(following))
        _require_choice("draft_sampling", self.draft_sampling, DRAFT_SAMPLINGS)
        _require_int("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFT_LEN)
        if self.method is None:
            self._check_plain()
        is_plain = self.method is None
        object.__setattr__(self, "num_speculative_tokens", 0 if is_plain else int(self.num_speculative_tokens))
        self._check_gate()
        self._check_acceptance()
        self._check_lookup()
        if self.draft_vocab_size is not None:
            _require_int("draft_vocab_size", self.draft_vocab_size, 1, None)
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
                _require_int(name, getattr(self, name), 1, None)
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
        _require_int("acceptance_window", self.acceptance_window, 1, None)
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
                _require_int(name, value, 1, None)
        if shortest is not None and longest is not None and shortest > longest:
            raise ConfigError(
                f"prompt_lookup_min is {shortest} and prompt_lookup_max {longest}; the first must not be the larger."
            )

    def _check_acceptance(self) -> None:
        is_rejection = self.acceptance == "rejection"
        if is_rejection and self.draft_sampling == "coupled":
            raise ConfigError(
                'draft_sampling is \'coupled\', which goes with acceptance="match"; acceptance="rejection" takes '
                "'probabilistic' or 'greedy' drafts."
            )
        if not is_rejection and self.draft_sampling == "probabilistic":
            raise ConfigError(
                f"draft_sampling is 'probabilistic', whose law acceptance={self.acceptance!r} would not look at; "
                "it takes 'coupled' or 'greedy' drafts."
            )
        if not isinstance(self.block_verification, bool):
            raise ConfigError(f"block_verification is {self.block_verification!r}; it must be True or False.")
        if self.block_verification and not is_rejection:
            raise ConfigError(f'block_verification goes with acceptance="rejection", not {self.acceptance!r}.')
        self._check_relaxed()
        if self.synthetic_acceptance is not None:
            self._check_synthetic(self.synthetic_acceptance)

    def _check_relaxed(self) -> None:
        for name in ("relaxed_topk", "relaxed_delta"):
            if getattr(self, name) is not None and self.acceptance != "relaxed":
                raise ConfigError(f'{name} goes with acceptance="relaxed", not {self.acceptance!r}.')
        if self.relaxed_topk is not None:
            _require_int("relaxed_topk", self.relaxed_topk, 1, None)
        if self.relaxed_delta is not None and not (is_real(self.relaxed_delta) and 0 <= self.relaxed_delta <= 1):
            raise ConfigError(f"relaxed_delta is {self.relaxed_delta!r}; it must be a number from 0 to 1.")

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
        if self.acceptance == "relaxed":
            raise ConfigError('acceptance="relaxed" does nothing under synthetic_acceptance; leave one of them out.')
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
        return self.acceptance == "relaxed" or self.synthetic_acceptance is not None

    def _check_schedule(self, schedule: Mapping[int, int]) -> None:
        if not schedule:
            raise ConfigError("draft_len_schedule is empty; it needs at least one {batch size: draft length} entry.")
        for batch_size, draft_len in schedule.items():
            _require_int("a batch size in draft_len_schedule", batch_size, 1, None)
            _require_int(f"draft_len_schedule[{batch_size}]", draft_len, 0, self.num_speculative_tokens)
        first = min(schedule)
        if schedule[first] != self.num_speculative_tokens:
            raise ConfigError(
                f"draft_len_schedule[{first}] is {schedule[first]}; the first entry must give "
                f"num_speculative_tokens={self.num_speculative_tokens}."
            )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. `page_size` Z positions a page; `num_pages` N pages beside the null page (None: derived)."""

    page_size: int = 16
    num_pages: int | None = None

    def __post_init__(self) -> None:
        _require_int("block_size", self.page_size, 1, None)
        if self.num_pages is not None:
            _require_int("num_kv_blocks", self.num_pages, 1, None)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices as `data` shards of `model` devices each.

    Slots and pages belong to a data shard; heads and feed-forward are split over `model`, experts and vocabulary over
    both axes.
    """

    data: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        _require_int("mesh['data']", self.data, 1, None)
        _require_int("mesh['model']", self.model, 1, None)

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.model


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything static about an engine; resolved once, logged once, never changed.

    `max_num_seqs` slots and `num_pages` pages are the whole mesh's; every data shard has an equal part of them.
    `max_logit_bias`, `max_bad_words` (of at most `max_bad_word_len` tokens) and their like bound a request's lists.
    """

    max_model_len: int
    max_num_seqs: int = 8
    mesh: MeshConfig = field(default_factory=MeshConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculative: SpeculativeConfig = field(default_factory=lambda: PLAIN)
    attention_backend: str = "reference"
    prefill_chunk: int = 256
    readback_depth: int = 1
    seed: int = 0
    max_logprobs: int = 20
    max_stop_token_ids: int = 32
    max_logit_bias: int = 300
    max_bad_words: int = 64
    max_bad_word_len: int = 16
    debug_checks: bool = False

    def __post_init__(self) -> None:
        _require_int("max_model_len", self.max_model_len, 2, None)
        _require_int("max_num_seqs", self.max_num_seqs, 1, None)
        _require_int("prefill_chunk", self.prefill_chunk, 1, None)
        _require_int("readback_depth", self.readback_depth, 0, 2)
        _require_int("seed", self.seed, 0, 2**64 - 1)
        _require_int("max_logprobs", self.max_logprobs, 0, None)
        _require_int("max_stop_token_ids", self.max_stop_token_ids, 0, None)
        _require_int("max_logit_bias", self.max_logit_bias, 0, None)
        _require_int("max_bad_words", self.max_bad_words, 0, None)
        _require_int("max_bad_word_len", self.max_bad_word_len, 1, None)
        for name, total in (("max_num_seqs", self.max_num_seqs), ("num_kv_blocks", self.cache.num_pages)):
            if total is not None and total % self.mesh.data != 0:
                raise ConfigError(
                    f"{name} is {total}; it must be a multiple of the mesh's {self.mesh.data} data shards."
                )

    @property
    def max_draft_len(self) -> int:
        """Kmax: draft lengths 0..Kmax are compiled."""
        return self.speculative.num_speculative_tokens

    @property
    def topology(self) -> Topology:
        """What the drafts of a step hang on."""
        return self.speculative.topology

    @property
    def pages_per_slot(self) -> int:
        """Width of a page-table row: pages of a request of `max_model_len` tokens."""
        return -(-self.max_model_len // self.cache.page_size)

    @property
    def num_pages(self) -> int:
        """Usable pages in the pool, the null page not counted. By default every slot can be full."""
        return self.cache.num_pages or self.max_num_seqs * self.pages_per_slot

    @property
    def list_sizes(self) -> ListSizes:
        """Room that every slot has for a request's logit biases and bad words."""
        return ListSizes(self.max_logit_bias, self.max_bad_words, self.max_bad_word_len)

    @property
    def slots_per_shard(self) -> int:
        """Slots of one data shard."""
        return self.max_num_seqs // self.mesh.data

    @property
    def pages_per_shard(self) -> int:
        """Usable pages of one data shard; each has a null page of its own beside them."""
        return self.num_pages // self.mesh.data


class FrozenMap(dict[int, int]):
    """A mapping that can be part of a hashable config."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))

    def __setitem__(self, key: int, value: int) -> None:
        raise TypeError("a configuration cannot be changed")


def _require_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")


def _require_name(option: str, value: object, *, or_none: bool = False) -> None:
    if not isinstance(value, str) and not (or_none and value is None):
        raise ConfigError(f"{option} is {value!r}; it must be a name{' or None' if or_none else ''}.")


def _require_int(name: str, value: object, low: int, high: int | None) -> None:
    if not is_int(value) or value < low or (high is not None and value > high):  # type: ignore[operator]
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} is {value!r}; it must be an integer {bounds}.")


PLAIN = SpeculativeConfig(method=None, num_speculative_tokens=0)
"""Plain decoding: no drafter, no drafts."""
