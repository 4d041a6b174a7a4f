"""The bundled model's card, written from the figures of its training run and the list of its sources."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """---
license: apache-2.0
language: en
---

# tiny-mtp

A language model of {millions:.1f} million parameters in the DeepSeek-V3 architecture: latent attention, mixture of \
experts, one Multi-Token-Prediction layer. It exists to show and test speculative decoding with real weights on any \
computer. It writes English and Python that look right; nothing it says is to be relied on.

- {num_hidden_layers} layers (the first {first_k_dense_replace} dense) and {num_nextn_predict_layers} MTP layer; width \
{hidden_size}, {num_attention_heads} heads, latent rank {kv_lora_rank}; {n_routed_experts} routed experts, \
{num_experts_per_tok} active.
- Byte-level BPE of {vocab_size} tokens; every digit is a token of its own; `<|endoftext|>` stands between documents.
- Trained on windows of up to {max_position_embeddings} tokens, so contexts beyond that are unknown to it.
"""


def model_card(config: Mapping[str, Any], report: Mapping[str, Any], corpus: Mapping[str, Any]) -> str:
    """Markdown, from `config.json`, `training.json` and `corpus.json`."""
    parts = [
        _INTRODUCTION.format(**config, millions=report["parameters"] / 1e6),
        _heldout(report["heldout"]),
        _training(report),
        _data(corpus["sources"], corpus["files"]),
    ]
    return "\n".join(parts)


def _heldout(heldout: Mapping[str, Mapping[str, Any]]) -> str:
    depths = len(next(iter(heldout.values()))["conditional"])
    numbers = [str(depth + 1) for depth in range(depths)]
    rows = [
        [part, f"{r['target_loss']:.3f}", f"{r['mtp_loss'][0]:.3f}"]
        + [f"{rate:.3f}" for rate in r["conditional"]]
        + [f"{r['mean_acceptance_length']:.2f}", f"{r['control'][0]:.3f} ({r['chance'][0]:.3f})"]
        for part, r in heldout.items()
    ]
    head = ["text", "loss", "MTP loss", *(f"draft {n}" for n in numbers), "tokens a step", "control (chance)"]
    return f"""## On held-out text

Whole documents that were kept out of training, chosen by the hash of their names. Loss in nats per token, MTP loss of \
the first draft. "Draft d": share of d-th drafts that equal the target's own greedy token, among those whose \
predecessors did; "tokens a step": mean acceptance length with {depths} drafts; "control": the same comparison with \
another position's token, which must be near what chance gives. Teacher-forced, with the weights as they are stored.

{_table(head, rows)}
"""


def _training(report: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            p["mode"],
            str(p["steps"]),
            f"{p['batch_size']} x {p['window']}",
            f"{p['peak_rate']:g}",
            str(p["objective"]["depths"]),
            f"{p['tokens'] / 1e6:.0f} M",
            f"{p['seconds']:.0f}",
        ]
        for name, p in report["phases"].items()
    ]
    head = ["phase", "trains", "steps", "batch", "peak rate", "MTP passes", "tokens", "seconds"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    steps = " ".join(str(phase["steps"]) for phase in report["phases"].values())
    return f"""## Training

{report["tokens_seen"] / 1e6:.0f} million tokens seen, {report["seconds"]:.0f} seconds on one {report["device"]} in \
bfloat16 with float32 masters ({versions}). "heads" trains the MTP layer towards the law of the frozen target, applied \
to its own hidden state again as it is when drafting.

{_table(head, rows)}

    python -m mtp_jax.train.corpus --out data
    python -m mtp_jax.train.tiny_mtp --data data --out OUT --work WORK --steps {steps}
"""


def _data(sources: Sequence[Mapping[str, Any]], files: Mapping[str, Mapping[str, int]]) -> str:
    total = sum(source["train_tokens"] for source in sources)
    text = [s for s in sources if s["kind"] != "code" and s["train_tokens"]]
    rows = [
        [f"{s['name']} {s['version']}", s["registry"], s["licence"], f"{s['train_tokens'] / 1e6:.2f} M"]
        for s in sorted(text, key=lambda s: -s["train_tokens"])
    ]
    code: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        if source["kind"] == "code" and source["train_tokens"]:
            code[source["licence"]].append(f"{source['name']} {source['version']}")
    share = sum(s["train_tokens"] for s in sources if s["kind"] == "code") / total
    code_lines = "\n".join(f"- {licence}: {', '.join(sorted(names))}." for licence, names in sorted(code.items()))
    return f"""## Data

{total / 1e6:.1f} million tokens of {files["train"]["documents"]:,} documents, {share:.0%} of them Python code, from \
packages under permissive licences or in the public domain. `mtp_jax/train/corpus_sources.toml` pins every package by \
version and SHA-256.

{_table(["prose and documentation", "from", "licence", "tokens"], rows)}

Python code:

{code_lines}
"""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
