"""`mtp-jax bench mesh`: the tokens of a mesh against those of one device, and the cost of the vote."""

from argparse import Namespace

from mtp_jax.bench.environment import chip, versions
from mtp_jax.bench.mesh import MeshBench, VoteCost, first_differences, near_limit_prompts, serve, vote_costs
from mtp_jax.cli.options import Parser, add_compile_cache, add_model, add_speculation
from mtp_jax.cli.start import load, speculative_config, start, use_compile_cache
from mtp_jax.core.errors import ConfigError
from mtp_jax.outputs import RequestOutput


def add_options(parser: Parser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--requests", type=int, default=64, metavar="N", help="requests near their limits; 0: compare no tokens"
    )
    parser.add_argument("--no-vote-cost", action="store_true", help="compare tokens only")
    parser.add_argument("--slots", type=int, default=16, metavar="B", help="slots of the whole mesh")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
    add_speculation(parser, policies=())
    add_model(parser)
    add_compile_cache(parser, default=False)


def run(options: Namespace) -> None:
    """Lines to stdout, one of JSON last."""
    if not options.mesh:
        raise ConfigError("bench mesh needs --mesh, such as --mesh data=2.")
    if options.requests < 0:
        raise ConfigError(f"--requests is {options.requests}; it must be at least 0.")
    use_compile_cache(options.compile_cache)
    model = load(options)
    speculative = speculative_config(options, policy="fixed")
    max_model_len = options.max_model_len or 128
    settings = {
        "max_model_len": max_model_len,
        "max_num_seqs": options.slots,
        "block_size": options.block_size,
        "num_kv_blocks": options.num_kv_blocks,
        "attention_backend": options.attention_backend,
        "moe_backend": options.moe_backend,
        "enable_prefix_caching": False,
        "prefill_chunk": 64,
    }
    prompts = near_limit_prompts(model.family.vocab_size, max_model_len, options.requests)
    alone: list[RequestOutput] = []
    if prompts:
        alone = serve(start(model, speculative, settings, "compiling for one device"), prompts, options.temperature)
    llm = start(model, speculative, {**settings, "mesh": options.mesh}, "compiling for the mesh")
    on_mesh = serve(llm, prompts, options.temperature)
    facts = {
        "model": str(options.model),
        "dtype": str(llm.dtype),
        "attention_backend": llm.engine.config.attention_backend,
        "temperature": options.temperature,
        "chip": chip(),
        "versions": versions(),
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    votes: list[VoteCost] = []
    if llm.engine.program.is_voting and not options.no_vote_cost:
        for vote in vote_costs(llm.engine, model.weights, llm.dtype):
            print(vote.as_text(), flush=True)
            votes.append(vote)
    bench = MeshBench(
        mesh=options.mesh,
        num_requests=len(prompts),
        num_tokens=sum(len(output.outputs[0].token_ids) for output in on_mesh),
        differences=first_differences(alone, on_mesh),
        votes=votes,
    )
    print(bench.as_text(), end="\n\n")
    print(bench.json_line(facts))
