"""`mtp-jax bench mesh`: a mesh's tokens against those of one device, the cost of the vote, and speed."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from mtp_jax.bench.environment import chip, versions
from mtp_jax.bench.intervals import FEWEST
from mtp_jax.bench.mesh import MeshBench, first_differences, near_limit_prompts, serve
from mtp_jax.bench.random_model import random_model
from mtp_jax.bench.scaling import scaling
from mtp_jax.bench.vote_cost import VoteCost, full_shapes, vote_costs
from mtp_jax.cli.options import Parser, add_compile_cache, add_model, add_speculation
from mtp_jax.cli.start import Model, load, speculative_config, start, use_compile_cache
from mtp_jax.core.errors import ConfigError
from mtp_jax.llm import LLM
from mtp_jax.options import mesh_config, resolve_dtype


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--requests", type=int, default=64, metavar="N", help="requests near their limits; 0: compare no tokens"
    )
    parser.add_argument(
        "--vote-rounds",
        type=int,
        default=40,
        metavar="N",
        help="rounds that the cost of the vote is taken over; 0: leave it out (default: %(default)s)",
    )
    parser.add_argument(
        "--speed-requests",
        type=int,
        default=0,
        metavar="N",
        help="requests to serve on the mesh and on one device that has as many slots as a data shard, for their speed; "
        "0: leave it out (default)",
    )
    parser.add_argument("--speed-tokens", type=int, default=128, metavar="N", help="tokens that each of them writes")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds of serving them that are timed")
    parser.add_argument("--slots", type=int, default=16, metavar="B", help="slots of the whole mesh")
    parser.add_argument(
        "--random-weights",
        metavar="FILE",
        help="a model with this config.json and random numbers for weights, in place of --model: for speed",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
    add_speculation(parser, policies=())
    add_model(parser)
    add_compile_cache(parser, default=False)


def run(options: Namespace) -> None:
    """Lines to stdout, one of JSON last."""
    _check_usage(options)
    use_compile_cache(options.compile_cache)
    model = _model(options)
    speculative = speculative_config(options, policy="fixed")
    num_shards = mesh_config(options.mesh).data
    max_model_len = options.max_model_len or 128
    settings: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": options.slots,
        "block_size": options.block_size,
        "num_kv_blocks": options.num_kv_blocks,
        "attention_backend": options.attention_backend,
        "moe_backend": options.moe_backend,
        "linear_backend": options.linear_backend,
        "enable_prefix_caching": False,
        "prefill_chunk": 64,
    }
    prompts = near_limit_prompts(model.family.vocab_size, max_model_len, options.requests)
    alone: LLM | None = None
    if prompts or options.speed_requests:
        part = {name: settings[name] // num_shards for name in ("max_num_seqs", "num_kv_blocks") if settings[name]}
        alone = start(model, speculative, {**settings, **part}, "compiling for one device")
    llm = start(model, speculative, {**settings, "mesh": options.mesh}, "compiling for the mesh")
    facts = {
        "model": str(options.random_weights or options.model),
        "dtype": str(llm.dtype),
        "attention_backend": llm.engine.config.attention_backend,
        "slots_per_data_shard": llm.engine.config.slots_per_shard,
        "max_draft_len": llm.engine.config.max_draft_len,
        "temperature": options.temperature,
        "chip": chip(),
        "versions": versions(),
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    on_mesh = serve(llm, prompts, options.temperature)
    differences = [] if alone is None else first_differences(serve(alone, prompts, options.temperature), on_mesh)
    speed = None
    if alone is not None and options.speed_requests:
        speed = scaling(
            alone,
            llm,
            num_requests=options.speed_requests,
            num_tokens=options.speed_tokens,
            rounds=options.repeats,
        )
    votes: list[VoteCost] = []
    if llm.engine.program.is_voting and options.vote_rounds:
        for vote in vote_costs(llm.engine, llm.dtype, full_shapes(llm.engine), num_rounds=options.vote_rounds):
            print(vote.as_text(), flush=True)
            votes.append(vote)
    bench = MeshBench(
        mesh=options.mesh,
        num_requests=len(prompts),
        num_tokens=sum(len(output.outputs[0].token_ids) for output in on_mesh),
        differences=differences,
        votes=votes,
        scaling=speed,
    )
    print(bench.as_text(), end="\n\n")
    print(bench.json_line(facts))


def _check_usage(options: Namespace) -> None:
    if not options.mesh:
        raise ConfigError("bench mesh needs --mesh, such as --mesh data=2.")
    for name, smallest in (("requests", 0), ("speed_requests", 0), ("speed_tokens", 1), ("repeats", 1)):
        if getattr(options, name) < smallest:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is {getattr(options, name)}; it must be at least {smallest}.")
    if options.vote_rounds != 0 and options.vote_rounds < FEWEST:
        raise ConfigError(f"--vote-rounds is {options.vote_rounds}; it must be 0, or at least {FEWEST}.")


def _model(options: Namespace) -> Model:
    """Not loaded onto the mesh: one device is to run it too."""
    if options.random_weights is None:
        return load(Namespace(**{**vars(options), "mesh": None}))
    file = Path(options.random_weights)
    dtype = resolve_dtype(options.dtype) or "bfloat16"
    family, weights = random_model(file, dtype)
    return Model(family, weights, None, dtype, None, file.parent)
