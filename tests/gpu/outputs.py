"""What engines on the GPU write, each computed once, by whichever worker process of the run asks first."""

import fcntl
import functools
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mtp_jax import LLM, CompletionOutput, SamplingParams
from mtp_jax.models.registry import family_from_config
from tests.models.shapes import config_of

PROMPTS = (
    "def fib(n):",
    "The President said to the Congress",
    "To install the package, run",
    "import numpy as np\nimport os\n\n\ndef read_lines(path):\n    with open(path) as file:\n        return file.read",
)
SPECULATIVE: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
    "tree": {"method": "dynamic_tree", "num_speculative_tokens": 2, "tree_topk": 2, "tree_nodes": 4},
}
# Few programs: one prefill chunk, two numbers of slots. The last prompt takes several chunks.
OPTIONS: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 4, "prefill_chunk": 16}
MAX_TOKENS = 96


@dataclass(frozen=True)
class Written:
    """The token ids of each prompt, and by how much (nats) each led the second best."""

    tokens: list[list[int]]
    margins: list[list[float]]


@dataclass(frozen=True)
class Engines:
    """The outputs, kept in a folder that all worker processes share."""

    folder: Path

    def greedy(self, dtype: str, backend: str = "reference", drafts: str = "plain") -> Written:
        """The bundled model at temperature 0."""
        return self._bundled(dtype, backend, drafts)["greedy"]

    def sampled(self, dtype: str, backend: str = "reference", drafts: str = "plain") -> Written:
        """The bundled model at temperature 0.8."""
        return self._bundled(dtype, backend, drafts)["sampled"]

    def experts(self, moe_backend: str, drafts: str = "plain") -> Written:
        """A model with experts, its weights random, in bfloat16 at temperature 0."""
        return self._once(
            f"experts-{moe_backend}-{drafts}", functools.partial(_write_with_experts, moe_backend, drafts)
        )["greedy"]

    def _bundled(self, dtype: str, backend: str, drafts: str) -> dict[str, Written]:
        return self._once(f"{dtype}-{backend}-{drafts}", functools.partial(_write, dtype, backend, drafts))

    def _once(self, name: str, write: Callable[[], dict[str, list[CompletionOutput]]]) -> dict[str, Written]:
        path = self.folder / f"{name}.json"
        with open(self.folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # who comes second waits for the first
            if not path.exists():
                outputs = write()
                path.write_text(json.dumps({key: [_plain(one) for one in value] for key, value in outputs.items()}))
        found = json.loads(path.read_text())
        return {key: Written(*([one[i] for one in value] for i in range(2))) for key, value in found.items()}


def _plain(output: CompletionOutput) -> tuple[list[int], list[float]]:
    assert output.logprobs is not None
    margins = []
    for entries in output.logprobs:
        first, second, *_ = sorted((entry.logprob for entry in entries.values()), reverse=True)
        margins.append(first - second)
    return output.token_ids, margins


def _generate(llm: LLM, prompts: Any, temperature: float) -> list[CompletionOutput]:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
        for i in range(len(prompts))
    ]
    return [output.outputs[0] for output in llm.generate(list(prompts), params, use_tqdm=False)]


def _write(dtype: str, backend: str, drafts: str) -> dict[str, list[CompletionOutput]]:
    llm = LLM("tiny-mtp", dtype=dtype, attention_backend=backend, speculative_config=SPECULATIVE[drafts], **OPTIONS)
    return {"greedy": _generate(llm, PROMPTS, 0.0), "sampled": _generate(llm, PROMPTS, 0.8)}


def _write_with_experts(moe_backend: str, drafts: str) -> dict[str, list[CompletionOutput]]:
    family = family_from_config(config_of("deepseek_v3", hidden_size=128, moe_intermediate_size=64))
    llm = LLM.from_weights(
        family,
        jax.tree_util.tree_map_with_path(_without_close_choices, family.init_weights(jax.random.key(0), None)),
        dtype=jnp.bfloat16,
        moe_backend=moe_backend,
        speculative_config=SPECULATIVE[drafts],
        **{**OPTIONS, "max_model_len": 128},
    )
    return {"greedy": _generate(llm, [[3, 4, 5], list(range(3, 25)), [7], [40, 41]], 0.0)}


def _without_close_choices(path: Any, array: jax.Array) -> jax.Array:
    """In bfloat16; and each layer takes two experts of its own whatever comes.

    A choice among experts that is nearly a tie would turn a rounding into another text.
    """
    name = jax.tree_util.keystr(path)
    if "correction_bias" in name:
        order = jax.random.permutation(jax.random.key(zlib.crc32(name.encode())), array.shape[-1])
        return jnp.broadcast_to(10.0 * order, array.shape).astype(jnp.float32)
    return array.astype(jnp.bfloat16)
