"""The recipe of the bundled model: `python -m mtp_jax.train.tiny_mtp --data DATA --out OUT --seconds 420`.

`DATA` is what `python -m mtp_jax.train.corpus` wrote. Three phases: target and MTP layer together on short windows, the
same on long windows with the learning rate going to zero, then the MTP layer alone on the frozen target, applied to its
own hidden state three times over and trained towards the target's law (which is what acceptance asks for).

`OUT` receives `config.json`, `model.safetensors` (bfloat16, Hugging Face layout), the tokenizer, a model card and
`training.json`: every figure of the run, the steps of each phase among them, so that `--steps` repeats it.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.registry import family_from_config
from mtp_jax.train import tokenizer
from mtp_jax.train.data import read_tokens
from mtp_jax.train.evaluate import evaluate_heads
from mtp_jax.train.export import rounded, write_model
from mtp_jax.train.loss import Objective
from mtp_jax.train.model_card import model_card
from mtp_jax.train.train import TrainConfig, Trainer

CONFIG: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "first_k_dense_replace": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 160,
    "initializer_range": 0.02,
    "intermediate_size": 480,
    "kv_lora_rank": 128,
    "max_position_embeddings": 1024,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 4,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 10,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": None,
    "qk_head_dim": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": True,
    "topk_group": 1,
    "use_cache": True,
    "v_head_dim": 32,
    "vocab_size": tokenizer.VOCAB_SIZE,
}
DRAFT_DEPTHS = 3

PHASES: Mapping[str, TrainConfig] = {
    "joint-short": TrainConfig(
        mode="joint",
        steps=6000,
        batch_size=128,
        window=512,
        peak_rate=3e-3,
        end_rate=1.2e-3,
        warmup_steps=300,
        objective=Objective(depths=1, mtp_weight=0.3),
    ),
    "joint-long": TrainConfig(
        mode="joint",
        steps=1500,
        batch_size=64,
        window=1024,
        peak_rate=1.2e-3,
        end_rate=0.0,
        warmup_steps=20,
        objective=Objective(depths=1, mtp_weight=0.3),
        seed=1,
    ),
    "heads": TrainConfig(
        mode="heads",
        steps=2000,
        batch_size=128,
        window=512,
        peak_rate=2e-3,
        end_rate=0.0,
        warmup_steps=50,
        objective=Objective(depths=DRAFT_DEPTHS, mtp_weight=1.0, distillation=1.0),
        seed=2,
    ),
}
SHARE_OF_TIME: Mapping[str, float] = {"joint-short": 0.55, "joint-long": 0.20, "heads": 0.25}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains, evaluates and writes the model; returns the content of `training.json`."""
    options = _parse(arguments)
    began = time.perf_counter()
    family = family_from_config(CONFIG)
    tokens = read_tokens(options.data / "train.tokens.xz")
    heldout = {part: read_tokens(options.data / f"heldout-{part}.tokens.xz") for part in ("prose", "code")}
    corpus = json.loads((options.data / "corpus.json").read_text(encoding="utf-8"))
    options.out.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.FILES:
        shutil.copyfile(options.data / file, options.out / file)
    weights = family.init_weights(jax.random.key(options.seed), jnp.float32)
    report: dict[str, Any] = {"parameters": num_parameters(weights), "train_tokens": len(tokens), "phases": {}}
    _say(f"{report['parameters']:,} parameters, {len(tokens):,} training tokens, {jax.devices()[0].device_kind}")

    for index, (name, planned) in enumerate(PHASES.items()):
        config = _resized(planned, options, index)
        compiling = time.perf_counter()
        trainer = Trainer(family, config, tokens, options.work / name)
        if options.steps is None:
            seconds_per_step = trainer.seconds_per_step(weights)
            steps = max(2, int(options.seconds * SHARE_OF_TIME[name] / seconds_per_step))
            config = trainer.config = replace(config, steps=steps, warmup_steps=min(config.warmup_steps, steps // 2))
            _say(f"{name}: {1e3 * seconds_per_step:.1f} ms a step, so {steps} steps")
        training = time.perf_counter()
        weights, _ = trainer.run(weights)
        jax.block_until_ready(weights)
        ended = time.perf_counter()
        heads = evaluate(family, weights, heldout, options)
        report["phases"][name] = {
            **asdict(config),
            "tokens": config.steps * config.batch_size * config.window,
            "seconds": round(ended - training, 1),
            "seconds_to_start": round(training - compiling, 1),
            "heldout": heads,
        }
        _say(f"{name}: {ended - training:.0f} s; {_summary(heads)}")
        # Each phase leaves a whole model behind: a run that is cut short loses the phases not begun, nothing else.
        report |= {
            "heldout": heads,
            "tokens_seen": sum(phase["tokens"] for phase in report["phases"].values()),
            "seconds": round(time.perf_counter() - began, 1),
            "device": jax.devices()[0].device_kind,
            "num_devices": config.data_parallel,
            "versions": {package: metadata.version(package) for package in ("jax", "jaxlib", "flax", "optax")},
            "seed": options.seed,
        }
        report["weights_bytes"] = write_model(options.out, family, weights, CONFIG)
        (options.out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (options.out / "README.md").write_text(model_card(CONFIG, report, corpus), encoding="utf-8")
    _say(json.dumps({key: report[key] for key in ("parameters", "tokens_seen", "seconds", "weights_bytes", "heldout")}))
    return report


def evaluate(
    family: ModelFamily, weights: Weights, heldout: Mapping[str, np.ndarray], options: argparse.Namespace
) -> dict[str, Any]:
    """Acceptance and losses on held-out prose and code, of the weights as the checkpoint holds them."""
    shipped = rounded(family, weights, CONFIG["dtype"])
    return {
        part: evaluate_heads(
            family,
            shipped,
            tokens,
            depths=DRAFT_DEPTHS,
            window=options.window or 512,
            batch_size=8,
            max_windows=options.evaluation_windows,
        ).as_dict()
        for part, tokens in heldout.items()
    }


def num_parameters(weights: Weights) -> int:
    """Parameters in all, MTP layer included."""
    return sum(leaf.size for leaf in jax.tree.leaves(weights))


def _resized(config: TrainConfig, options: argparse.Namespace, index: int) -> TrainConfig:
    steps = config.steps if options.steps is None else options.steps[index]
    return replace(
        config,
        steps=steps,
        warmup_steps=min(config.warmup_steps, steps // 2),
        batch_size=options.batch_size or config.batch_size,
        window=options.window or config.window,
        data_parallel=options.data_parallel,
        save_every=options.save_every,
        compute_dtype=options.compute_dtype,
        seed=config.seed + options.seed,
    )


def _summary(heads: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{part}: loss {r['target_loss']:.3f}, MTP {r['mtp_loss'][0]:.3f}, acceptance "
        f"{' '.join(f'{a:.3f}' for a in r['conditional'])}, length {r['mean_acceptance_length']:.2f}"
        for part, r in heads.items()
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the bundled model.")
    parser.add_argument("--data", type=Path, required=True, help="folder with token files and tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--work", type=Path, required=True, help="folder for logs and snapshots")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=420.0, help="training time, shared among the phases")
    length.add_argument("--steps", type=int, nargs=len(PHASES), help="steps of each phase, instead of a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-parallel", type=int, default=1, help="devices that share each batch")
    parser.add_argument("--save-every", type=int, default=0, help="steps between snapshots (0: phase ends only)")
    parser.add_argument("--batch-size", type=int, help="windows a step, for small trials")
    parser.add_argument("--window", type=int, help="positions a window, for small trials")
    parser.add_argument("--evaluation-windows", type=int, help="held-out windows of each part (all of them by default)")
    # Not every product of bfloat16 exists on CPUs.
    default_dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    parser.add_argument("--compute-dtype", default=default_dtype, choices=("bfloat16", "float32"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
