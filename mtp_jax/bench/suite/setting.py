"""What a run of the suite measures, at full size or small enough for a test, and the results its parts share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from mtp_jax.bench.suite.floors import Floor
from mtp_jax.bench.suite.loop import Backends, Load, suite_engine
from mtp_jax.bench.suite.models import DENSE, MOE, TINY_DENSE, TINY_MOE, SuiteModel, random_weights
from mtp_jax.core.speculative import SpeculativeConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.models.api import Weights
from mtp_jax.models.decoder import MtpDecoder

DRAFT_LEN = 3
ACCEPTANCE = 0.7


def forced_acceptance(draft_len: int) -> list[float]:
    """`synthetic_acceptance` by which each draft stands with probability `ACCEPTANCE` after those before it.

    >>> [round(share, 3) for share in forced_acceptance(3)]
    [0.7, 0.49, 0.343]
    """
    return [ACCEPTANCE ** (k + 1) for k in range(draft_len)]


@dataclass(frozen=True)
class Row:
    """One line of the suite's table. Empty fields say nothing."""

    what: str
    batch_size: int | None = None
    ms_per_step: float | None = None
    floor_ms: float | None = None
    tokens_per_s: float | None = None
    against_plain: float | None = None
    efficiency: float | None = None
    kernels: float | None = None
    idle_share: float | None = None
    note: str = ""

    @property
    def over_floor(self) -> float | None:
        """How many times the floor a step takes."""
        if self.ms_per_step is None or self.floor_ms is None:
            return None
        return self.ms_per_step / self.floor_ms


@dataclass
class Findings:
    """Filled by the parts, in their order: what later ones hold theirs against, the table's rows, all figures."""

    copy_rate: float | None = None  # bytes a second
    plain_tokens_per_s: dict[int, float] = field(default_factory=dict[int, float])  # dense model, by batch size
    best_tokens_per_s: dict[int, float] = field(default_factory=dict[int, float])  # with drafts, by batch size
    rows: list[Row] = field(default_factory=list[Row])
    figures: dict[str, Any] = field(default_factory=dict[str, Any])  # by part

    def floor_ms(self, num_bytes: float) -> float | None:
        """The time of reading so many bytes at the measured rate; None where that was not measured."""
        return None if self.copy_rate is None else 1000 * num_bytes / self.copy_rate


@dataclass(frozen=True)
class Loaded:
    """A model of the suite in memory."""

    model: SuiteModel
    family: MtpDecoder
    weights: Weights
    floor: Floor


@dataclass(frozen=True)
class Setting:
    """Sizes of a run."""

    backends: Backends
    batch_sizes: tuple[int, ...]
    load: Load
    dense: SuiteModel
    moe: SuiteModel
    copy_bytes: int
    is_tiny: bool
    peer_python: str | None = None  # an interpreter that has torch and transformers; None: this one
    peer_timeout_s: float = 300.0

    @classmethod
    def full(cls, backends: Backends, batch_sizes: tuple[int, ...]) -> "Setting":
        """As the figures of the documentation are measured."""
        return cls(backends, batch_sizes, Load(), DENSE, MOE, copy_bytes=4 << 30, is_tiny=False)

    @classmethod
    def tiny(cls, backends: Backends, batch_sizes: tuple[int, ...]) -> "Setting":
        """The same parts in seconds on a CPU: their figures mean nothing."""
        load = Load(rounds=1, steps=4, warm_steps=1, profiled_steps=0)
        return cls(backends, batch_sizes, load, TINY_DENSE, TINY_MOE, copy_bytes=1 << 20, is_tiny=True)

    def load_model(self, model: SuiteModel) -> Loaded:
        """Its family, random weights on the device, and the bytes of its parts."""
        family = model.family()
        dtype = jnp.dtype(self.backends.dtype)
        return Loaded(model, family, random_weights(family, dtype), Floor.of(family, dtype.itemsize))

    def engine(
        self,
        loaded: Loaded,
        speculative: SpeculativeConfig | None,
        batch_sizes: Sequence[int] | None = None,
        *,
        all_draft_lens: bool = False,
    ) -> Engine:
        """Over that model, with programs for these batch sizes (the run's own by default)."""
        return suite_engine(
            loaded.model,
            loaded.family,
            loaded.weights,
            self.backends,
            speculative=speculative,
            batch_sizes=self.batch_sizes if batch_sizes is None else batch_sizes,
            load=self.load,
            all_draft_lens=all_draft_lens,
        )
