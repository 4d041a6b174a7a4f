"""What the kernel benchmark runs: shapes, lengths and tile configurations by name."""

from dataclasses import dataclass, replace
from typing import Any

from kernels_pallas.paged_attention.contract import Problem


@dataclass(frozen=True)
class Case:
    """One shape with one tile configuration. `tile` holds (field, value) pairs that differ from the default."""

    name: str
    kind: str  # "check" | "time" | "peer" | "write" | "dense" | "ceilings"
    num_slots: int = 64
    num_rows: int = 1
    num_q_heads: int = 32
    num_kv_heads: int = 8
    k_channels: int = 128
    v_channels: int = 128
    page_size: int = 64
    context: int = 4096
    lengths: str = "uniform"  # "uniform" | "ragged" | "edges"
    is_latent: bool = False
    is_tree: bool = False
    dtype: str = "bfloat16"
    tile: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Case":
        """The case whose fields went through JSON."""
        return cls(**{**fields, "tile": tuple((name, value) for name, value in fields["tile"])})

    @property
    def pages_per_slot(self) -> int:
        """Entries of a slot's page table."""
        longest = self.context * (4 if self.lengths == "ragged" else 1)
        return -(-longest // self.page_size)

    def problem(self) -> Problem:
        """The shape facts that `supports` and the tuning tables are asked about."""
        return Problem(
            num_slots=self.num_slots,
            num_rows=self.num_rows,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            k_channels=self.k_channels,
            v_channels=self.v_channels,
            page_size=self.page_size,
            pages_per_slot=self.pages_per_slot,
            dtype=self.dtype,
            is_latent=self.is_latent,
            has_ancestor_bits=self.is_tree,
        )


_GQA = Case("", "time")
_MLA16 = Case("", "time", num_q_heads=16, num_kv_heads=1, k_channels=576, v_channels=512, is_latent=True)
_MLA128 = replace(_MLA16, num_q_heads=128)

SHAPES = {
    "gqa W1": _GQA,
    "gqa W4": replace(_GQA, num_rows=4),
    "gqa W1 ragged": replace(_GQA, lengths="ragged"),
    "gqa W4 ragged": replace(_GQA, num_rows=4, lengths="ragged"),
    "gqa W1 page16": replace(_GQA, page_size=16),
    "gqa W1 batch1 32k": replace(_GQA, num_slots=1, context=32768),
    "mla16 W1": _MLA16,
    "mla16 W4": replace(_MLA16, num_rows=4),
    "mla16 W4 ragged": replace(_MLA16, num_rows=4, lengths="ragged"),
    "mla16 W4 page16": replace(_MLA16, num_rows=4, page_size=16),
    "mla128 W1": _MLA128,
    "mla128 W4": replace(_MLA128, num_rows=4),
    "mla128 W1 ragged": replace(_MLA128, lengths="ragged"),
}

CHUNKS = {
    "gqa chunk of 1024": replace(_GQA, num_slots=1, num_rows=1024, context=1024),
    "gqa chunk of 512 at 4096": replace(_GQA, num_slots=4, num_rows=512, context=4608),
    "mla16 chunk of 512 at 4096": replace(_MLA16, num_slots=4, num_rows=512, context=4608),
}


def _timed() -> list[Case]:
    cases = [replace(shape, name=name) for name, shape in SHAPES.items()]
    for name, shape in CHUNKS.items():
        cases.append(replace(shape, name=name))
        if not shape.is_latent:
            cases.append(replace(shape, name=f"{name} cudnn", kind="dense"))
    cases += [replace(SHAPES[name], name=f"{name} write", kind="write") for name in ("gqa W4", "mla16 W4")]
    return cases


_CHECK = Case("", "check", num_slots=12, context=700, lengths="edges")

CHECKS: list[Case] = [
    replace(_CHECK, name="check gqa W1 page16", page_size=16),
    replace(_CHECK, name="check gqa W4 page64", num_rows=4),
    replace(_CHECK, name="check gqa W8 page128 tree", num_rows=8, page_size=128, is_tree=True),
    replace(_CHECK, name="check gqa W3 page32 tree", num_rows=3, page_size=32, is_tree=True),
    replace(_CHECK, name="check mha W2 64ch", num_rows=2, num_q_heads=4, num_kv_heads=4, k_channels=64, v_channels=64),
    replace(
        _CHECK,
        name="check gqa W5 256ch block128",
        num_rows=5,
        k_channels=256,
        v_channels=256,
        num_kv_heads=4,
        tile=(("block", 128), ("num_stages", 1)),
    ),
    replace(_CHECK, name="check gqa W6 group16", num_rows=6, num_kv_heads=2),
    replace(_CHECK, name="check gqa chunk of 100", num_rows=100, page_size=32),
    replace(
        _MLA16,
        name="check mla16 chunk of 48",
        kind="check",
        num_slots=12,
        context=700,
        lengths="edges",
        num_rows=48,
    ),
    replace(_MLA16, name="check mla16 W1", kind="check", num_slots=12, context=700, lengths="edges"),
    replace(
        _MLA16,
        name="check mla16 W4 page16",
        kind="check",
        num_slots=12,
        context=700,
        lengths="edges",
        num_rows=4,
        page_size=16,
    ),
    replace(
        _MLA16,
        name="check mla16 W7 page32 tree",
        kind="check",
        num_slots=12,
        context=700,
        lengths="edges",
        num_rows=7,
        page_size=32,
        is_tree=True,
    ),
    replace(
        _MLA128,
        name="check mla128 W2 page128",
        kind="check",
        num_slots=12,
        context=700,
        lengths="edges",
        num_rows=2,
        page_size=128,
    ),
    replace(
        _MLA16,
        name="check latent 192/128 W5",
        kind="check",
        num_slots=12,
        context=700,
        lengths="edges",
        num_rows=5,
        num_q_heads=4,
        k_channels=192,
        v_channels=128,
    ),
    replace(
        _MLA16,
        name="check latent 192/128 W5 float32",
        kind="check",
        num_slots=12,
        context=700,
        lengths="edges",
        num_rows=5,
        num_q_heads=4,
        k_channels=192,
        v_channels=128,
        dtype="float32",
    ),
    replace(_CHECK, name="check gqa W3 page16 tree float32", num_rows=3, page_size=16, is_tree=True, dtype="float32"),
]
TIMES: list[Case] = _timed()
PEERS: list[Case] = [replace(shape, name=f"{name} flashinfer", kind="peer") for name, shape in SHAPES.items()]
CEILINGS = Case("ceilings", "ceilings")
CASES: dict[str, Case] = {case.name: case for case in [*CHECKS, *TIMES, *PEERS]}
