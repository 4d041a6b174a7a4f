"""What a user may ask for. Frozen, hashable, free of jax; every bound is checked once, at start or at admission."""

from dataclasses import dataclass, field
from enum import StrEnum

from mtp_jax.core.errors import ConfigError
from mtp_jax.core.layout import ListSizes
from mtp_jax.core.requirements import require_int
from mtp_jax.core.sampling_params import SamplingParams as SamplingParams
from mtp_jax.core.speculative import DRAFT_SAMPLINGS as DRAFT_SAMPLINGS
from mtp_jax.core.speculative import MAX_DRAFT_LEN as MAX_DRAFT_LEN
from mtp_jax.core.speculative import NEAR_LIMIT_RULES as NEAR_LIMIT_RULES
from mtp_jax.core.speculative import PLAIN as PLAIN
from mtp_jax.core.speculative import FrozenMap as FrozenMap
from mtp_jax.core.speculative import SpeculativeConfig as SpeculativeConfig
from mtp_jax.core.topology import Topology


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    REJECTED = "rejected"


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. `page_size` Z positions a page; `num_pages` N pages beside the null page (None: derived).

    `prefix_caching`: whole pages of prompts are kept, and requests that begin alike share them.
    """

    page_size: int = 16
    num_pages: int | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        require_int("block_size", self.page_size, 1, None)
        if self.num_pages is not None:
            require_int("num_kv_blocks", self.num_pages, 1, None)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices as `data` shards of `model` devices each.

    Slots and pages belong to a data shard; heads and feed-forward are split over `model`, experts and vocabulary over
    both axes.
    """

    data: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        require_int("mesh['data']", self.data, 1, None)
        require_int("mesh['model']", self.model, 1, None)

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.model


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything static about an engine; resolved once, logged once, never changed.

    `max_num_seqs` slots and `num_pages` pages are the whole mesh's; every data shard has an equal part of them.
    `max_logit_bias`, `max_bad_words` (of at most `max_bad_word_len` tokens) and their like bound a request's lists.
    `greedy_programs`: every shape is compiled once more, without what greedy requests do not need, and batches of such
    requests run that: for devices on which a branch not taken costs time too, as on GPUs.
    """

    max_model_len: int
    max_num_seqs: int = 8
    mesh: MeshConfig = field(default_factory=MeshConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculative: SpeculativeConfig = field(default_factory=lambda: PLAIN)
    attention_backend: str = "reference"
    moe_backend: str = "reference"
    linear_backend: str = "xla"
    prefill_chunk: int = 256
    readback_depth: int = 1
    seed: int = 0
    max_logprobs: int = 20
    max_stop_token_ids: int = 32
    max_logit_bias: int = 300
    max_bad_words: int = 64
    max_bad_word_len: int = 16
    greedy_programs: bool = False
    debug_checks: bool = False

    def __post_init__(self) -> None:
        require_int("max_model_len", self.max_model_len, 2, None)
        require_int("max_num_seqs", self.max_num_seqs, 1, None)
        require_int("prefill_chunk", self.prefill_chunk, 1, None)
        require_int("readback_depth", self.readback_depth, 0, 2)
        require_int("seed", self.seed, 0, 2**64 - 1)
        require_int("max_logprobs", self.max_logprobs, 0, None)
        require_int("max_stop_token_ids", self.max_stop_token_ids, 0, None)
        require_int("max_logit_bias", self.max_logit_bias, 0, None)
        require_int("max_bad_words", self.max_bad_words, 0, None)
        require_int("max_bad_word_len", self.max_bad_word_len, 1, None)
        for name, total in (("max_num_seqs", self.max_num_seqs), ("num_kv_blocks", self.cache.num_pages)):
            if total is not None and total % self.mesh.data != 0:
                raise ConfigError(
                    f"{name} is {total}; it must be a multiple of the mesh's {self.mesh.data} data shards."
                )

        for name in ("max_stop_token_ids", "max_logit_bias", "max_bad_words"):
            if getattr(self, name) == 0 and self.mesh.num_devices > 1:
                raise ConfigError(f"{name} is 0; on a mesh it must be at least 1: XLA fails to split empty arrays.")

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
