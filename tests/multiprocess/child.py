"""One process of a mesh, started by the tests: serves near-limit schedules and compares each with plain decoding.

    python -m tests.multiprocess.child JSON

JSON: {"port", "process", "num_processes", "local_devices", "mesh": [data, model], "schedules": [first, last], "case"}
and, where it is not the MTP layer alone that drafts, "drafting": fields of a `SpeculativeConfig`.
Prints one line for each schedule that was right, then "all right".
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

HEARTBEAT_S = 10


def main(options: dict[str, Any]) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", options["local_devices"])
    if options["case"] not in CONNECT_THEMSELVES:
        jax.distributed.initialize(
            f"127.0.0.1:{options['port']}",
            options["num_processes"],
            options["process"],
            initialization_timeout=60,
            heartbeat_timeout_seconds=HEARTBEAT_S,
        )
    CASES[options["case"]](options)
    print("all right", flush=True)


def serve_schedules(options: dict[str, Any]) -> None:
    from mtp_jax.testing.driving import run_plan
    from mtp_jax.testing.engines import poison, restart
    from mtp_jax.testing.policies import ScriptedDraftLen
    from tests.laws.support import assert_plain

    engine = engine_of(options)
    shards = engine.placement.local_shards
    first, last = options["schedules"]
    for schedule in range(first, last):
        common = random.Random(schedule)  # what all processes must do alike
        depth, near_limit = common.randrange(3), common.choice(("row_cap", "group_zero"))
        # Processes that share their data shards draw the same requests; others have other work, or none.
        own = random.Random(f"{schedule} {shards}")
        requests = near_limit_requests(own, engine.config.max_model_len)
        wishes = [ScriptedDraftLen(tuple(own.randrange(4) for _ in range(6))) for _ in shards]
        if own.random() < 0.3:
            time.sleep(own.random() * 0.02)
        running = restart(engine, policies=wishes, readback_depth=depth, near_limit=near_limit)
        if schedule % 10 == 0:
            poison(running)
        assert_plain(running, requests, run_plan(running, requests))
        print(f"{schedule} right: {len(requests)} requests", flush=True)


def serve_without_the_reduction(options: dict[str, Any]) -> None:
    """The planted fault: every shard takes its own wish for what was agreed."""
    from mtp_jax.ops.sharding import Parallel

    Parallel.largest = lambda self, votes_V: votes_V  # type: ignore[method-assign]
    serve_schedules(options)


def start_unlike_the_others(options: dict[str, Any]) -> None:
    """The processes disagree: about the slots, the near-limit rule, a single weight, a weight that is on the mesh."""
    from mtp_jax.core.config import EngineConfig, MeshConfig, SpeculativeConfig
    from mtp_jax.core.errors import ConfigError
    from mtp_jax.engine.engine import Engine
    from mtp_jax.models.sharding import weight_specs
    from mtp_jax.ops.placement import Placement
    from mtp_jax.testing.toy_family import ToyFamily

    data, model = options["mesh"]
    process, family, mesh = options["process"], ToyFamily(vocab_size=24), MeshConfig(data=data, model=model)
    weights = family.init_weights(jax.random.key(0), None)
    others = {**weights, "head": weights["head"].at[7].add(process)}
    placement = Placement.of(mesh)

    def start(max_num_seqs: int = data, near_limit: str = "row_cap", weights: Any = weights) -> None:
        speculative = SpeculativeConfig(near_limit=near_limit)
        config = EngineConfig(max_model_len=32, max_num_seqs=max_num_seqs, mesh=mesh, speculative=speculative)
        try:
            Engine(family, weights, config)
        except ConfigError as error:
            print(f"refused: {error}", flush=True)

    start(max_num_seqs=data * (1 + process))
    start(near_limit=("row_cap", "group_zero")[process])
    start(weights=others)
    start(weights=placement.put(others, weight_specs(family, placement.rules)))


def die_in_the_middle(options: dict[str, Any]) -> None:
    """The last process goes without a word after its first schedules; the others would go on for long."""
    if options["process"] == options["num_processes"] - 1:
        serve_schedules({**options, "schedules": [0, 3]})
        os._exit(9)
    serve_schedules({**options, "schedules": [0, 100_000]})


def generate_together(options: dict[str, Any]) -> None:
    """`LLM.generate` on every process: unequal lists, an empty one, twice."""
    from mtp_jax import LLM, SamplingParams
    from mtp_jax.testing.engines import without_optimizations
    from mtp_jax.testing.oracle import plain_decode
    from mtp_jax.testing.toy_family import ToyFamily
    from tests.laws.support import request

    family = ToyFamily(vocab_size=24)
    weights = family.init_weights(jax.random.key(0), None)
    llm = without_optimizations(
        lambda: LLM.from_weights(
            family,
            weights,
            mesh=dict(zip(("data", "model"), options["mesh"], strict=True)),
            max_num_seqs=2,
            max_model_len=32,
            prefill_chunk=16,
            speculative_config={"num_speculative_tokens": 1},
        )
    )
    for turn, lengths in enumerate([(3, 0), (0, 0), (1, 4)]):
        prompts = [[turn, i, 5] for i in range(lengths[options["process"]])]
        seen: list[str] = []
        outputs = llm.generate(
            prompts,
            SamplingParams(temperature=0, max_tokens=9),
            use_tqdm=False,
            on_output=lambda output, seen=seen: seen.append(output.request_id),  # type: ignore[misc]
        )
        for prompt, output in zip(prompts, outputs, strict=True):
            one = request("0", prompt, temperature=0.0, max_tokens=9)
            expected = plain_decode(family.plain_logits, one, max_model_len=32).tokens
            assert tuple(output.outputs[0].token_ids) == expected
        assert sorted(seen) == sorted(output.request_id for output in outputs)
        print(f"{turn} right: {len(outputs)} outputs", flush=True)


def near_limit_requests(own: random.Random, max_model_len: int) -> list[Any]:
    """None to five requests, most of them with a prompt that ends within a few tokens of the limit."""
    from tests.laws.support import request

    requests = []
    for index in range(own.choice((0, 0, 1, 2, 5))):
        length = own.randrange(max_model_len - 9, max_model_len) if own.random() < 0.7 else own.randrange(1, 8)
        requests.append(
            request(
                str(index),
                tuple(own.randrange(24) for _ in range(length)),
                seed=own.randrange(2**32),
                temperature=own.choice((0.0, 1.0)),
                max_tokens=own.randrange(1, 12),
                stop_token_ids=own.choice(((), (3,))),
            )
        )
    return requests


def engine_of(options: dict[str, Any], *, slots_per_shard: int = 1) -> Any:
    from mtp_jax.testing.engines import toy_engine
    from mtp_jax.testing.toy_family import ToyFamily

    data, model = options["mesh"]
    return toy_engine(
        ToyFamily(vocab_size=24),
        data=data,
        model=model,
        max_draft_len=3,
        max_num_seqs=data * options.get("slots_per_shard", slots_per_shard),
        max_model_len=32,
        page_size=4,
        **options.get("drafting", {}),
    )


def fail_with(llm: Any, prompt: tuple[int, ...]) -> None:
    """Lets every launch of this process fail while the prompt is in one of its slots."""
    launcher = llm.engine.launcher
    launch = launcher.launch

    def failing(decision: Any, inputs: Any) -> Any:
        seated = [slot.state.request.prompt for shard in llm.engine.group.shards for slot in shard.slots]
        if prompt in seated:
            raise jax.errors.JaxRuntimeError("INTERNAL: poisoned")
        return launch(decision, inputs)

    launcher.launch = failing


def run_a_batch(options: dict[str, Any]) -> None:
    """One engine over all processes answers a file whose lines belong to one data shard, then a whole one."""
    from mtp_jax.batch import run_batch
    from mtp_jax.batch.team import Place, join
    from mtp_jax.core.config import MeshConfig
    from mtp_jax.llm import LLM
    from mtp_jax.models.sharding import weight_specs
    from mtp_jax.ops.placement import Placement
    from mtp_jax.testing.engines import without_optimizations
    from mtp_jax.testing.toy_family import ToyFamily

    mesh: dict[str, int] = dict(zip(("data", "model"), options["mesh"], strict=True))
    team = join(Place(f"127.0.0.1:{options['port']}", options["process"], options["num_processes"]), mesh)
    family = ToyFamily(vocab_size=30)
    placement = Placement.of(MeshConfig(**mesh))
    # On the mesh already, as a model is that was loaded onto it.
    weights = placement.put(family.init_weights(jax.random.key(0), None), weight_specs(family, placement.rules))

    def make_llm() -> LLM:
        llm = without_optimizations(
            lambda: LLM.from_weights(
                family,
                weights,
                mesh=mesh,
                max_num_seqs=2,
                max_model_len=40,
                block_size=4,
                prefill_chunk=16,
                speculative_config={"num_speculative_tokens": 1},
            )
        )
        if "poison" in options:
            fail_with(llm, tuple(options["poison"]))
        return llm

    output = options["folder"] + "/out.jsonl"
    summary = run_batch(
        make_llm,
        [options["folder"] + "/in.jsonl"],
        output,
        model="toy",
        job={},
        team=team,
        resume=True,
        lines_per_part=5,
    )
    print(f"right: {summary.num_lines} lines, {summary.is_complete}", flush=True)


CASES: dict[str, Callable[[dict[str, Any]], None]] = {
    "schedules": serve_schedules,
    "no reduction": serve_without_the_reduction,
    "unlike": start_unlike_the_others,
    "generate": generate_together,
    "batch": run_a_batch,
    "death": die_in_the_middle,
}

CONNECT_THEMSELVES = {"batch"}

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
