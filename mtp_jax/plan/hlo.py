"""Collectives of a program, read from the text of its HLO: how many, of how many bytes, over how many devices.

Either form is read, what jax lowered and what a compiler made of it. Of a conditional two readings are kept: the branch
that moves least and the one that moves most. In the steps of this project the first is what a launch does when no
request asks for more than greedy tokens.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+).*\{$")
_OPCODE = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?P<shape>.*?) (?P<op>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16|f8\w+|c64|c128)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":?\{"n":"(\d+)"\}')
_NO_CALLS = ("all-reduce", "reduce-scatter", "reduce", "sort", "scatter", "select-and-scatter", "reduce-window", "map")
"""What they call is applied to single elements."""


@dataclass(frozen=True)
class Group:
    """Devices that take part together: `size` of them, on `num_hosts` hosts."""

    size: int
    num_hosts: int = 1


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, the bytes of its larger side on a device, and who takes part."""

    kind: str
    num_bytes: int
    group: Group

    @property
    def sent_bytes(self) -> float:
        """What each device must send at least: (g - 1)/g of the larger side, twice for an all-reduce."""
        passes = 2 if self.kind == "all-reduce" else 1
        share = 1.0 if self.kind == "collective-permute" else (self.group.size - 1) / self.group.size
        return passes * share * self.num_bytes

    @property
    def sent_to_hosts_bytes(self) -> float:
        """What each device of a host must send to other hosts at least, the host's devices sharing the work."""
        hosts = self.group.num_hosts
        if hosts == 1:
            return 0.0
        passes = 2 if self.kind == "all-reduce" else 1
        per_host = self.group.size / hosts
        whole = self.num_bytes * (per_host if self.kind == "all-to-all" else 1)
        return passes * (hosts - 1) / hosts * whole / per_host


@dataclass(frozen=True)
class Collectives:
    """What a program exchanges: in the branches that move least, and in those that move most."""

    least: tuple[Collective, ...] = ()
    most: tuple[Collective, ...] = ()

    def __add__(self, other: "Collectives") -> "Collectives":
        return Collectives(self.least + other.least, self.most + other.most)

    def times(self, count: int) -> "Collectives":
        """The same so many times over."""
        return Collectives(self.least * count, self.most * count)


def total_bytes(collectives: Sequence[Collective]) -> int:
    """Bytes of the larger sides together."""
    return sum(one.num_bytes for one in collectives)


@dataclass
class _Computation:
    own: list[Collective] = field(default_factory=list)
    called: list[tuple[str, int]] = field(default_factory=list)  # name, times
    branches: list[list[str]] = field(default_factory=list)


def read_collectives(text: str, *, num_devices: int, devices_per_host: int | None = None) -> Collectives:
    """The collectives of a module's entry computation and of all that it calls.

    `num_devices`: of the program, the group of a collective that names none. `devices_per_host` None: all on one.

    >>> text = '''ENTRY main {
    ...   ROOT r = f32[4,2]{1,0} all-reduce(x), replica_groups={{0,1},{2,3}}, to_apply=add
    ... }'''
    >>> [one] = read_collectives(text, num_devices=4).least
    >>> one.kind, one.num_bytes, one.group.size, one.sent_bytes
    ('all-reduce', 32, 2, 32.0)
    """
    computations: dict[str, _Computation] = {}
    entry, current = None, _Computation()
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None:
            current = computations.setdefault(header[2], _Computation())
            entry = header[2] if header[1] else entry
            continue
        _read_line(line, current, num_devices, devices_per_host)
    if entry is None:
        return Collectives()
    return _walk(entry, computations, {})


def _read_line(line: str, into: _Computation, num_devices: int, devices_per_host: int | None) -> None:
    found = _OPCODE.match(line)
    if found is None:
        return
    op = found["op"].removesuffix("-start")
    if op in _KINDS:
        into.own.append(_collective(op, found, line, num_devices, devices_per_host))
    if op in _NO_CALLS or op.endswith(("-done", "-update")):
        return
    branches = _BRANCHES.search(line)
    if branches is not None:
        names = [branches[2], branches[3]] if branches[1] is None else branches[1].split(",")
        into.branches.append([name.strip().removeprefix("%") for name in names])
    trips = _TRIPS.search(line)
    into.called += [(name, int(trips[1]) if trips else 1) for name in _CALLED.findall(line)]


def _collective(
    kind: str, found: re.Match[str], line: str, num_devices: int, devices_per_host: int | None
) -> Collective:
    arrays = [_num_bytes(*array) for array in _ARRAY.findall(found["shape"])]
    group = _group(line, num_devices, devices_per_host)
    size = sum(arrays) * (group.size if kind == "reduce-scatter" else 1)
    if found["op"] == "all-gather-start":  # its shape holds operands and results
        size = size * group.size // (group.size + 1)
    if found["op"] == "collective-permute-start":  # and what it waits for
        size = max(arrays)
    return Collective(kind, size, group)


def _num_bytes(dtype: str, sizes: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"^f8.*", "8", dtype.lstrip("bsufc")) or 8)
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8


def _group(line: str, num_devices: int, devices_per_host: int | None) -> Group:
    members = _members(line, num_devices)
    per_host = num_devices if devices_per_host is None else devices_per_host
    return Group(len(members), len({member // per_host for member in members}))


def _members(line: str, num_devices: int) -> list[int]:
    """The devices of the first group: groups of a collective are alike."""
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line):
        return [int(pairs[1]), int(pairs[2])]
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(member) for member in listed[1].split(",")]
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        dims = [int(size) for size in iota[3].split(",")]
        order = [int(axis) for axis in iota[4].split(",")] if iota[4] else list(range(len(dims)))
        return _flattened(dims, order)[: int(iota[2])]
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", mesh[1])}
        mapped = re.findall(r"'?(\w+)'?", mesh[2])
        axes = list(sizes)
        order = [axes.index(name) for name in axes if name not in mapped] + [axes.index(name) for name in mapped]
        return _flattened(list(sizes.values()), order)[: math.prod(sizes[name] for name in mapped)]
    return list(range(num_devices))


def _flattened(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """Numbers 0, 1, ... laid out by `dims`, read with the dimensions in another order."""
    strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
    members = [0]
    for axis in order:
        members = [member + place * strides[axis] for member in members for place in range(dims[axis])]
    return members


def _walk(name: str, computations: Mapping[str, _Computation], known: dict[str, Collectives]) -> Collectives:
    if name not in known:
        computation = computations.get(name, _Computation())
        total = Collectives(tuple(computation.own), tuple(computation.own))
        for called, times in computation.called:
            total += _walk(called, computations, known).times(times)
        for branch in computation.branches:
            total += _extremes(_walk(one, computations, known) for one in branch)
        known[name] = total
    return known[name]


def _extremes(branches: Iterator[Collectives]) -> Collectives:
    each = list(branches)
    least = min((branch.least for branch in each), key=total_bytes)
    return Collectives(least, max((branch.most for branch in each), key=total_bytes))
