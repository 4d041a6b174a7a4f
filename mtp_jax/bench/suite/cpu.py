"""Small trained models on a CPU: the engine's own choice of draft length against transformers' plain decoding."""

import os
import tempfile
from pathlib import Path
from typing import Any

from mtp_jax.bench.compare import compare
from mtp_jax.bench.measure import Workload
from mtp_jax.bench.prompts import BUILT_IN, tokens_of
from mtp_jax.bench.suite.peers import run_peer
from mtp_jax.bench.suite.setting import DRAFT_LEN, Findings, Row, Setting
from mtp_jax.checkpoints import load_model
from mtp_jax.checkpoints.convert import save_hf_model
from mtp_jax.core.sampling_params import SamplingParams
from mtp_jax.core.speculative import SpeculativeConfig
from mtp_jax.llm import LLM
from mtp_jax.text import tokenizer_of

_SHORTLISTS = {"smollm2-135m": 8192}


def cpu_model(name: str, setting: Setting, findings: Findings) -> dict[str, Any]:
    """Tokens a second at batch 1, float32: plain, by `goodput`, and transformers' `generate` on the same weights."""
    loaded = load_model(name, dtype="float32")
    tokenizer = tokenizer_of(loaded)
    num_tokens = 8 if setting.is_tiny else 128
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    workload = Workload(tokens_of(BUILT_IN, tokenizer, 1), params)
    longest = len(workload.prompts[0])
    speculative = SpeculativeConfig(
        num_speculative_tokens=DRAFT_LEN, policy="goodput", draft_vocab_size=_SHORTLISTS.get(name)
    )

    def engine(config: SpeculativeConfig | None) -> LLM:
        return LLM.from_weights(
            loaded.family,
            loaded.weights,
            tokenizer=tokenizer,
            dtype=loaded.dtype,
            speculative_config=config,
            tokens_by_rank=loaded.tokens_by_rank,
            max_model_len=-(-(longest + num_tokens) // 16) * 16,
            max_num_seqs=1,
            prefill_chunk=16,
            enable_prefix_caching=False,
        )

    found = compare(engine(speculative), engine(None), workload, repeats=1 if setting.is_tiny else 3)
    task = {
        "batch_sizes": [1],
        "context": longest,
        "tokens": num_tokens,
        "device": "cpu",
        "ways": ["eager"],
        "threads": os.cpu_count(),
    }
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"  # in the layout that transformers reads
        save_hf_model(name, folder, dtype="float32")
        peer = list(run_peer({**task, "folder": str(folder)}, setting.peer_python, setting.peer_timeout_s))
    speeds = {"plain": found.plain.tokens_per_s, "goodput": found.drafting.tokens_per_s}
    theirs = next((line["tokens_per_s"] for line in peer if "tokens_per_s" in line), None)
    for way, speed in speeds.items():
        note = "" if theirs is None else f"{speed / theirs:.2f}x transformers"
        findings.rows.append(Row(f"{name}, {way}", 1, tokens_per_s=speed, note=note))
    findings.rows.append(Row(f"{name}, transformers", 1, tokens_per_s=theirs, note=str(peer[-1].get("error", ""))))
    return {
        "tokens_per_s": speeds,
        "tokens_equal": found.difference is None,
        "acceptance_length": found.drafting.mean_acceptance_length,
        "peer": peer,
    }
