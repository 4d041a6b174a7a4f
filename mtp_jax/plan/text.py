"""A plan for people, and the same as one JSON object."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mtp_jax.memory import in_units
from mtp_jax.plan.choice import expected_tokens
from mtp_jax.plan.floor import Floor
from mtp_jax.plan.hlo import Collective, Collectives, total_bytes
from mtp_jax.plan.plan import BatchPlan, Plan, sum_parameters
from mtp_jax.plan.program import Depth

Rows = list[list[str]]


def facts(plan: Plan) -> dict[str, str]:
    """What was asked, and how the answer was come by."""
    question, chip = plan.question, plan.question.where.chip
    mesh = question.mesh
    share = f"{question.memory_share:.0%} of {in_units(chip.hbm_bytes)}"
    return {
        "model": f"{question.family.name}, {sum_parameters(question.family):,} parameters",
        "on": f"{question.where.name}: {question.where.num_devices} devices, mesh data={mesh.data},model={mesh.model}",
        "of a device": f"{share}, {chip.hbm_bytes_s / 1e9:.0f} GB/s, {chip.flop_s / 1e12:.0f} TFLOP/s in bfloat16, "
        f"{chip.send_bytes_s / 1e9:.0f} GB/s sent",
        "figures from": chip.source,
        "dtype, attention": f"{question.dtype}, {question.backend}",
        "context": f"{question.context} tokens in every slot",
        "exchanges read from": _scaling(plan),
        "temporaries": _temporaries(plan),
    }


def _scaling(plan: Plan) -> str:
    if plan.question.where.num_devices == 1:
        return "nothing: one device"
    return (
        f"lowered programs of {_layers(plan.lowered[0])}, and of one more of each kind; scaled to {_layers(plan.depth)}"
    )


def _temporaries(plan: Plan) -> str:
    if not plan.compiled:
        return "an estimate from below; --compile asks the compiler"
    seconds = sum(one.seconds for one in plan.compiled)
    return (
        f"of compiled programs of {' and '.join(_layers(one.depth) for one in _by_depth(plan))}, scaled to "
        f"{_layers(plan.depth)} ({seconds:.0f} s of compiling)"
    )


def _by_depth(plan: Plan) -> list[Any]:
    return list({one.depth: one for one in plan.compiled}.values())


def _layers(depth: Depth) -> str:
    kinds = {"dense": depth.dense, "with experts": depth.experts}
    parts = [f"{count} {kind}" for kind, count in kinds.items() if count]
    return " + ".join(parts) + (" layer" if depth.dense + depth.experts == 1 else " layers")


def memory_rows(plan: Plan) -> Rows:
    """Bytes on a device at the largest batch that was asked for."""
    memory, batch = plan.memory, max(plan.question.batch_sizes)
    slots = -(-batch // memory.num_data_shards)
    used = memory.used_bytes(batch, plan.question.context)
    kv = used - memory.weight_bytes - slots * memory.state_bytes_per_slot - memory.temporaries.of(slots)
    return [
        ["a device's memory", "", f"batch {batch}"],
        ["weights", "", in_units(memory.weight_bytes)],
        ["KV", f"{in_units(memory.bytes_per_token)} a token", in_units(int(kv))],
        ["state", f"{in_units(memory.state_bytes_per_slot)} a slot", in_units(slots * memory.state_bytes_per_slot)],
        ["temporaries", memory.temporaries.source, in_units(int(memory.temporaries.of(slots)))],
        ["together", "fits" if used <= memory.usable_bytes else "DOES NOT FIT", in_units(int(used))],
        ["may be used", "", in_units(memory.usable_bytes)],
    ]


def fit_rows(plan: Plan) -> Rows:
    """How long requests can be at each batch size."""
    head = ["batch", "bytes at this context", "fits", "longest context"]
    return [
        head,
        *(
            [
                str(one.batch),
                in_units(int(one.used_bytes)),
                "yes" if one.used_bytes <= plan.memory.usable_bytes else "no",
                str(one.longest_context),
            ]
            for one in plan.batches
        ),
    ]


def exchange_rows(plan: Plan) -> Rows:
    """Collectives of a step by draft length: count, and bytes of their larger side on a device. None on one device."""
    if plan.question.where.num_devices == 1:
        return []
    rows = [["collectives a step", "devices", "hosts", *(f"K = {k}" for k in range(len(plan.exchanged)))]]
    counted = [_counted(of.least) for of in plan.exchanged]
    for key in sorted({key for counts in counted for key in counts}):
        kind, size, hosts = key
        cells = [f"{counts[key][0]}, {in_units(counts[key][1])}" if key in counts else "-" for counts in counted]
        rows.append([kind, str(size), str(hosts), *cells])
    most = [in_units(total_bytes(of.most)) for of in plan.exchanged]
    rows.append(["all, if a request asks for more", "", "", *most])
    return rows


def _counted(collectives: Sequence[Collective]) -> dict[tuple[str, int, int], tuple[int, int]]:
    counts: Counter[tuple[str, int, int]] = Counter()
    sizes: Counter[tuple[str, int, int]] = Counter()
    for one in collectives:
        key = (one.kind, one.group.size, one.group.num_hosts)
        counts[key] += 1
        sizes[key] += one.num_bytes
    return {key: (counts[key], sizes[key]) for key in counts}


def floor_rows(plan: Plan) -> Rows:
    """Least milliseconds of a step, and what bounds it, by batch size and draft length."""
    lengths = range(plan.question.speculative.num_speculative_tokens + 1)
    rows = [["least ms of a step, by batch", *(f"K = {k}" for k in lengths)]]
    for one in plan.batches:
        rows.append([str(one.batch), *(f"{floor.seconds * 1e3:.3f} {floor.bound}" for floor in one.floors)])
    return rows


def choice_rows(plan: Plan) -> Rows:
    """Break-even acceptance by draft length, and the best length by acceptance."""
    lengths = range(1, plan.question.speculative.num_speculative_tokens + 1)
    assumed = list(plan.batches[0].best)
    rows = [["batch", *(f"K = {k} pays from" for k in lengths), *(f"best K at {name}" for name in assumed)]]
    for one in plan.batches:
        even = ["never" if rate is None else f"{rate:.2f}" for rate in one.break_even]
        rows.append([str(one.batch), *even, *(str(one.best[name]) for name in assumed)])
    return rows


# ---- JSON


def as_json(plan: Plan) -> dict[str, Any]:
    """All of it, in bytes and seconds."""
    question, memory = plan.question, plan.memory
    return {
        "model": question.family.name,
        "num_parameters": sum_parameters(question.family),
        "topology": question.where.name,
        "num_devices": question.where.num_devices,
        "mesh": {"data": question.mesh.data, "model": question.mesh.model},
        "chip": asdict(question.where.chip),
        "dtype": question.dtype,
        "attention_backend": question.backend,
        "moe_backend": question.moe_backend,
        "method": question.speculative.method,
        "context": question.context,
        "page_size": question.page_size,
        "layers": asdict(plan.depth),
        "lowered_layers": [asdict(depth) for depth in plan.lowered] if question.where.num_devices > 1 else [],
        "memory": {
            "usable_bytes": memory.usable_bytes,
            "weight_bytes": memory.weight_bytes,
            "kv_bytes_per_token": memory.kv_bytes_per_token,
            "draft_kv_bytes_per_token": memory.draft_kv_bytes_per_token,
            "state_bytes_per_slot": memory.state_bytes_per_slot,
            "temporaries": asdict(memory.temporaries),
        },
        "largest_batch": plan.largest_batch,
        "collectives": [_exchange_json(k, plan.exchanged_batch, of) for k, of in enumerate(plan.exchanged)],
        "compiled": [
            {
                "layers": asdict(one.depth),
                "slots_per_shard": one.slots,
                "draft_len": one.draft_len,
                "argument_bytes": one.argument_bytes,
                "temporary_bytes": one.temporary_bytes,
                "code_bytes": one.code_bytes,
                "collectives": _list_json(one.exchanged.least),
                "seconds": one.seconds,
            }
            for one in plan.compiled
        ],
        "batches": [_batch_json(plan, one) for one in plan.batches],
    }


def _exchange_json(draft_len: int, batch: int, of: Collectives) -> dict[str, Any]:
    return {
        "draft_len": draft_len,
        "batch": batch,
        "greedy": _list_json(of.least),
        "num_bytes_greedy": total_bytes(of.least),
        "num_bytes_most": total_bytes(of.most),
    }


def _list_json(collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "devices": size, "hosts": hosts, "count": count, "num_bytes": num_bytes}
        for (kind, size, hosts), (count, num_bytes) in sorted(_counted(collectives).items())
    ]


def _batch_json(plan: Plan, one: BatchPlan) -> dict[str, Any]:
    shares = plan.question.accepted_per_pos
    return {
        "batch": one.batch,
        "used_bytes": one.used_bytes,
        "fits": one.used_bytes <= plan.memory.usable_bytes,
        "longest_context": one.longest_context,
        "steps": [_floor_json(floor, shares) for floor in one.floors],
        "break_even_acceptance": list(one.break_even),
        "best_draft_len": dict(one.best),
    }


def _floor_json(floor: Floor, shares: Sequence[float] | None) -> dict[str, Any]:
    told = {
        "draft_len": floor.draft_len,
        "floor_s": floor.seconds,
        "bound": floor.bound,
        "memory_s": floor.memory_s,
        "matrix_s": floor.matrix_s,
        "links_s": floor.links_s,
        "read_bytes": {
            "weights": floor.load.weight_bytes,
            "experts": floor.load.expert_bytes,
            "kv": floor.load.kv_bytes,
        },
        "flop": floor.load.flop,
    }
    if shares is not None:
        tokens = 1 + sum(shares[: floor.draft_len])
        told["tokens_per_s_at_most"] = floor.batch * tokens / floor.seconds
    return told


def tokens_per_s(floor: Floor, rates: Sequence[float]) -> float:
    """What a batch brings at most, with one conditional rate a draft."""
    return floor.batch * expected_tokens(rates[: floor.draft_len]) / floor.seconds
