"""Puts a plan together: what fits, what is exchanged, how fast a step can be at most, how much to draft."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import jax.numpy as jnp

from kernels_pallas.paged_attention import BACKENDS
from mtp_jax.core.config import CacheConfig, EngineConfig, MeshConfig, SpeculativeConfig
from mtp_jax.core.errors import ConfigError, InvariantError
from mtp_jax.core.requirements import require_choice, require_int
from mtp_jax.core.shapes import StepShape
from mtp_jax.memory import in_units
from mtp_jax.models.decoder import MtpDecoder
from mtp_jax.models.moe_backend import with_moe_backend
from mtp_jax.models.sharding import check_mesh
from mtp_jax.plan.chips import Slice
from mtp_jax.plan.choice import best_draft_len, break_even
from mtp_jax.plan.compiled import CompiledStep, compile_step
from mtp_jax.plan.floor import Floor, Roofline
from mtp_jax.plan.hlo import Collective, Collectives
from mtp_jax.plan.memory import Local, Memory, Temporaries, estimated_temporaries, memory_of
from mtp_jax.plan.program import Depth, PlannedStep, abstract_target, of_depth
from mtp_jax.proposers.registry import resolve_method

RATES = (0.5, 0.7, 0.9)
"""Conditional acceptance, the same at every position, that the best draft length is told for."""

_SLOTS_READ = (2, 4)
"""Slots of a data shard whose programs are lowered; what they exchange grows in a straight line with the slots."""

OnProgram = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """What is to be planned. `batch_sizes` and `context` (tokens in every slot) are of the whole mesh.

    `memory_share`: part of a device's memory that may be used. `accepted_per_pos`: shares of steps in which drafts
    stand, by position. `wants_compile`: temporaries by the platform's compiler rather than an estimate.
    """

    family: MtpDecoder
    where: Slice
    mesh: MeshConfig
    speculative: SpeculativeConfig
    dtype: str = "bfloat16"
    context: int = 4096
    batch_sizes: tuple[int, ...] = (1, 8, 32, 128)
    page_size: int = 64
    attention_backend: str | None = None
    moe_backend: str = "reference"
    memory_share: float = 0.9
    accepted_per_pos: tuple[float, ...] | None = None
    wants_compile: bool = False

    def __post_init__(self) -> None:
        require_int("context", self.context, 2, self.family.max_position_embeddings)
        for batch in self.batch_sizes:
            require_int("batch_sizes", batch, 1, None)
        if self.attention_backend is not None:
            require_choice("attention_backend", self.attention_backend, tuple(BACKENDS))
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share is {self.memory_share}; it must be above 0 and at most 1.")
        if self.mesh.num_devices != self.where.num_devices:
            raise ConfigError(
                f"mesh={{'data': {self.mesh.data}, 'model': {self.mesh.model}}} has {self.mesh.num_devices} devices; "
                f"{self.where.name} has {self.where.num_devices}: {_meshes(self.family, self.where.num_devices)}."
            )
        _check_mesh(self.family, self.mesh)
        _check_shares(self.accepted_per_pos, self.speculative.num_speculative_tokens)

    @property
    def backend(self) -> str:
        """Of attention: the chip's own kernel unless another is asked for."""
        return self.where.chip.kernel if self.attention_backend is None else self.attention_backend

    def config(self, slots_per_shard: int) -> EngineConfig:
        """The engine's, with so many slots on every data shard, each of which can be full."""
        return EngineConfig(
            max_model_len=self.context,
            max_num_seqs=slots_per_shard * self.mesh.data,
            mesh=self.mesh,
            cache=CacheConfig(page_size=self.page_size),
            speculative=self.speculative,
            attention_backend=self.backend,
            moe_backend=self.moe_backend,
        )


@dataclass(frozen=True)
class BatchPlan:
    """One batch size: its floors by draft length, and what follows from them."""

    batch: int
    used_bytes: float
    longest_context: int
    floors: tuple[Floor, ...]
    break_even: tuple[float | None, ...]
    best: Mapping[str, int]  # by what is taken for the acceptance


@dataclass(frozen=True)
class Plan:
    """The answer. `depth` of the model, and which depths were lowered for it; `exchanged` by draft length."""

    question: Question
    depth: Depth
    lowered: tuple[Depth, ...]
    memory: Memory
    exchanged: tuple[Collectives, ...]  # of `exchanged_batch`
    exchanged_batch: int
    batches: tuple[BatchPlan, ...]
    compiled: tuple[CompiledStep, ...] = ()

    @property
    def largest_batch(self) -> int:
        """Requests of `context` tokens that fit at once."""
        return self.memory.largest_batch(self.question.context)


def make_plan(question: Question, on_program: OnProgram = lambda what: None) -> Plan:
    """Lowers, or compiles, what `question` needs; `on_program` is told before each.

    `ConfigError` for a model that does not fit: it says by how much.
    """
    family = with_moe_backend(question.family, question.moe_backend, jnp.dtype(question.dtype))
    assert isinstance(family, MtpDecoder)  # its experts' products changed, nothing else
    question = replace(question, family=family, speculative=_drafting(question.speculative, family))
    depth = Depth.of(family)
    step = _step(question, depth, 1)
    estimate = estimated_temporaries(family, step.config, Local(step), question.dtype)
    memory = memory_of(step, estimate, share=question.memory_share)
    _check_fits(question, memory)
    compiled: tuple[CompiledStep, ...] = ()
    if question.wants_compile:
        compiled, temporaries = _compiled(question, depth, on_program)
        memory = replace(memory, temporaries=temporaries)
    exchange = _Exchange(question, depth, on_program)
    batches = tuple(_batch_plan(question, step, memory, exchange, batch) for batch in question.batch_sizes)
    largest = max(question.batch_sizes)
    num_lengths = question.speculative.num_speculative_tokens + 1
    return Plan(
        question=question,
        depth=depth,
        lowered=(depth.shortest, *depth.increments()),
        memory=memory,
        exchanged=tuple(exchange.of(largest, draft_len) for draft_len in range(num_lengths)),
        exchanged_batch=largest,
        batches=batches,
        compiled=compiled,
    )


def _drafting(speculative: SpeculativeConfig, family: MtpDecoder) -> SpeculativeConfig:
    """As the engine would draft: no further than the model can. `ConfigError` for a model without the layers for it."""
    _, max_draft_len = resolve_method(speculative, family)
    return speculative if max_draft_len == speculative.num_speculative_tokens else speculative.limited_to(max_draft_len)


def _step(question: Question, depth: Depth, slots: int, *, backend: str | None = None) -> PlannedStep:
    config = question.config(slots)
    if backend is not None:
        config = replace(config, attention_backend=backend)
    family = question.family if depth == Depth.of(question.family) else of_depth(question.family, depth)
    return PlannedStep(family, config, question.dtype, abstract_target(question.where, config))


class _Exchange:
    """What steps exchange: read from lowered programs of few layers, scaled to all of them."""

    def __init__(self, question: Question, depth: Depth, on_program: OnProgram) -> None:
        self._question, self._depth, self._on_program = question, depth, on_program
        self._read: dict[tuple[int, int], Collectives] = {}

    def of(self, batch: int, draft_len: int) -> Collectives:
        """Of a step of `batch` slots over all data shards."""
        if self._question.where.num_devices == 1:
            return Collectives()
        slots = -(-batch // self._question.mesh.data)
        small, large = (self._at(count, draft_len) for count in _SLOTS_READ)
        return Collectives(
            _on_line(small.least, large.least, slots),
            _on_line(small.most, large.most, slots),
        )

    def _at(self, slots: int, draft_len: int) -> Collectives:
        known = self._read.get((slots, draft_len))
        if known is None:
            known = self._read[slots, draft_len] = self._whole(slots, draft_len)
        return known

    def _whole(self, slots: int, draft_len: int) -> Collectives:
        shortest = self._lowered(self._depth.shortest, slots, draft_len)
        total = shortest
        for depth, count in self._depth.increments().items():
            longer = self._lowered(depth, slots, draft_len)
            more = Collectives(_difference(longer.least, shortest.least), _difference(longer.most, shortest.most))
            total += more.times(count)
        return total

    def _lowered(self, depth: Depth, slots: int, draft_len: int) -> Collectives:
        self._on_program(f"{depth.dense + depth.experts} layers, {slots} slots, {draft_len} drafts")
        # Attention exchanges nothing, whatever its backend.
        step = _step(self._question, depth, slots, backend="reference")
        return step.collectives(StepShape(slots, draft_len))


def num_lowered(question: Question) -> int:
    """Programs that `make_plan` lowers."""
    if question.where.num_devices == 1:
        return 0
    depths = 1 + len(Depth.of(question.family).increments())
    return depths * len(_SLOTS_READ) * (question.speculative.num_speculative_tokens + 1)


def _difference(longer: Sequence[Collective], shorter: Sequence[Collective]) -> tuple[Collective, ...]:
    """What is in the longer program beside the shorter one's."""
    rest = list(longer)
    for one in shorter:
        if one not in rest:
            raise InvariantError(f"a program with one layer more lacks the collective {one}")
        rest.remove(one)
    return tuple(rest)


def _on_line(small: Sequence[Collective], large: Sequence[Collective], slots: int) -> tuple[Collective, ...]:
    """The collectives at `slots`, on the straight line through those at both of `_SLOTS_READ`."""
    first, second = _SLOTS_READ
    on_line: list[Collective] = []
    for one, other in zip(small, large, strict=True):
        if (one.kind, one.group) != (other.kind, other.group):
            raise InvariantError(f"with more slots a program has {other} in place of {one}")
        slope = (other.num_bytes - one.num_bytes) // (second - first)
        on_line.append(replace(one, num_bytes=one.num_bytes + slope * (slots - first)))
    return tuple(on_line)


def _batch_plan(question: Question, step: PlannedStep, memory: Memory, exchange: _Exchange, batch: int) -> BatchPlan:
    roofline = Roofline(step, question.context)
    lengths = range(question.speculative.num_speculative_tokens + 1)
    floors = tuple(roofline.floor(batch, k, exchange.of(batch, k).least) for k in lengths)
    step_s = [floor.seconds for floor in floors]
    assumed = {f"{rate:.0%}": (rate,) * len(lengths) for rate in RATES}
    if question.accepted_per_pos is not None:
        assumed["as given"] = conditional_rates(question.accepted_per_pos)
    return BatchPlan(
        batch=batch,
        used_bytes=memory.used_bytes(batch, question.context),
        longest_context=memory.longest_context(batch),
        floors=floors,
        break_even=tuple(break_even(k, step_s[k] / step_s[0]) for k in lengths if k > 0),
        best={name: best_draft_len(step_s, rates) for name, rates in assumed.items()},
    )


def conditional_rates(shares: Sequence[float]) -> tuple[float, ...]:
    """Rates given that all drafts before stand, from shares of all steps.

    >>> conditional_rates((0.8, 0.4))
    (0.8, 0.5)
    """
    before = (1.0, *shares)
    return tuple(share / earlier if earlier > 0 else 0.0 for share, earlier in zip(shares, before, strict=False))


def _compiled(question: Question, depth: Depth, on_program: OnProgram) -> tuple[tuple[CompiledStep, ...], Temporaries]:
    """Temporaries by compiled programs: of one layer of each kind at two numbers of slots, and with a layer more."""
    slots = -(-max(question.batch_sizes) // question.mesh.data)
    draft_len = question.speculative.num_speculative_tokens

    def compiled(of: Depth, count: int) -> CompiledStep:
        on_program(f"compiling {of.dense + of.experts} layers, {count} slots")
        return compile_step(_step(question, of, count), StepShape(count, draft_len), of)

    shortest = compiled(depth.shortest, slots)
    fewer = compiled(depth.shortest, max(slots // 2, 1)) if slots > 1 else None
    longer = {of: compiled(of, slots) for of in depth.increments()}
    growth = sum(
        count * max(longer[of].temporary_bytes - shortest.temporary_bytes, 0)
        for of, count in depth.increments().items()
    )
    per_slot = 0.0
    if fewer is not None:
        per_slot = max(shortest.temporary_bytes - fewer.temporary_bytes, 0) / (slots - fewer.slots)
    fixed = shortest.temporary_bytes + growth - per_slot * slots
    programs = (shortest, *([] if fewer is None else [fewer]), *longer.values())
    return programs, Temporaries(fixed, per_slot, "compiled")


# ---- what is refused


def _check_mesh(family: MtpDecoder, mesh: MeshConfig) -> None:
    try:
        check_mesh(family, mesh)
    except ConfigError as error:
        raise ConfigError(f"{str(error).removesuffix('.')}: {_meshes(family, mesh.num_devices)}.") from error


def _meshes(family: MtpDecoder, num_devices: int) -> str:
    """The meshes of so many devices that the model can be split over, in words."""
    fitting: list[str] = []
    for model in (size for size in range(1, num_devices + 1) if num_devices % size == 0):
        mesh = MeshConfig(data=num_devices // model, model=model)
        try:
            check_mesh(family, mesh)
        except ConfigError:
            continue
        fitting.append(f"data={mesh.data},model={mesh.model}")
    if not fitting:
        return f"no mesh of {num_devices} devices divides this model"
    return f"of {num_devices} devices " + " or ".join(fitting[-6:]) + (" fits" if len(fitting) == 1 else " fit")


def _check_fits(question: Question, memory: Memory) -> None:
    missing = memory.weight_bytes - memory.usable_bytes
    if missing <= 0:
        return
    family, where = question.family, question.where
    raise ConfigError(
        f"{family.name} of {sum_parameters(family) / 1e9:.1f} billion parameters does not fit: its weights in "
        f"{question.dtype} take {in_units(memory.weight_bytes)} of each of the {where.num_devices} devices of "
        f"{where.name}, which have {in_units(memory.usable_bytes)} ({question.memory_share:.0%} of their memory): "
        f"{in_units(missing)} too little."
    )


def sum_parameters(family: MtpDecoder) -> int:
    """All weights, MTP layers included, each counted once."""
    return sum(math.prod(spec.shape) for spec in family.tensors())


def _check_shares(shares: Sequence[float] | None, num_drafts: int) -> None:
    if shares is None:
        return
    if len(shares) != num_drafts:
        raise ConfigError(f"accepted_per_pos has {len(shares)} shares; {num_drafts} drafts need as many.")
    if not all(0 <= share <= 1 for share in shares) or any(later > earlier for earlier, later in pairwise(shares)):
        raise ConfigError(
            f"accepted_per_pos is {', '.join(map(str, shares))}; it must be numbers from 0 to 1, none above the one "
            "before: a draft stands only if all before it do."
        )
