"""Eagle3 drafters from disk: every tensor used or named, the token map checked, and a model that drafts with one."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from mtp_jax import LLM, SamplingParams
from mtp_jax.checkpoints import CheckpointError, add_drafter, write_hf
from mtp_jax.core.errors import ConfigError
from mtp_jax.testing.engines import without_optimizations
from mtp_jax.testing.toy_family import ToyFamily
from tests.checkpoints.support import assert_same_bits
from tests.models.tiny_eagle3 import DRAFTER_CONFIG, TARGET_CONFIG, VOCAB_SIZE, tensors_of, tiny_eagle3, token_ids

TINY = tiny_eagle3()


@pytest.fixture(scope="module")
def joined() -> Any:
    return TINY.init_weights(jax.random.key(0), None)


def drafter_tensors(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    """As published: offsets in int64, a mask, weights; None leaves a tensor out."""
    tensors = tensors_of(TINY.drafter, "drafter.")
    tensors["t2d"] = np.isin(np.arange(VOCAB_SIZE), token_ids())
    changed = {**tensors, **{name.replace("__", "."): array for name, array in changes.items()}}
    return {name: array for name, array in changed.items() if array is not None}


def write_drafter(folder: Path, config: dict[str, Any] | None = None, **changes: np.ndarray | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(DRAFTER_CONFIG | (config or {})), encoding="utf-8")
    save_file(drafter_tensors(**changes), folder / "model.safetensors")
    return folder


def test_a_published_drafter_is_loaded_bit_for_bit(joined: Any, tmp_path: Path) -> None:
    target = {name: array for name, array in joined.items() if name != "drafter"}
    family, weights = add_drafter(TINY.target, target, write_drafter(tmp_path), dtype="float32")
    assert (family.target, family.drafter) == (TINY.target, TINY.drafter)
    assert_same_bits(weights, joined)
    with_embedding = write_drafter(tmp_path / "own", embed_tokens__weight=np.ones((VOCAB_SIZE, 16), np.float32))
    family, weights = add_drafter(TINY.target, target, with_embedding, dtype="bfloat16")
    assert family.drafter.has_embedding
    assert weights["drafter"]["embedding"].dtype == "bfloat16"
    assert weights["drafter"]["token_map"].dtype == "int32"


def test_without_a_vocabulary_of_its_own_it_needs_no_map(tmp_path: Path) -> None:
    head = np.ones((VOCAB_SIZE, 16), np.float32)
    folder = write_drafter(tmp_path, {"draft_vocab_size": None}, d2t=None, t2d=None, lm_head__weight=head)
    family, weights = add_drafter(TINY.target, {}, folder, dtype="float32")
    assert family.draft_ids(weights) is None


IDS = token_ids()
OFFSETS = IDS - np.arange(len(IDS))
BAD_TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"fc__weight": None}, r"lacks tensor 'fc.weight', which family 'eagle3' needs"),
    "no map": ({"d2t": None}, "lacks tensor 'd2t'"),
    "unknown": (
        {"midlayer__q_norm": np.ones(4, np.float32)},
        "has tensor 'midlayer.q_norm', which family 'eagle3' does",
    ),
    "too few features": ({"fc__weight": np.ones((16, 32), np.float32)}, r"'fc.weight' of shape \[16, 32\]"),
    "map of another length": ({"d2t": OFFSETS[:-1]}, r"'d2t' of shape \[15\]; the config asks for \[16\]"),
    "ids for differences": ({"d2t": IDS}, r"takes draft id \d+ to token \d+; .* from 0 to 23 \(the tensor holds diff"),
    "below zero": ({"d2t": OFFSETS - 2}, "takes draft id 0 to token -1"),
    "beyond what an int32 holds": ({"d2t": OFFSETS + 2**32}, "takes draft id 0 to token 4294967297"),
    "one token twice": ({"d2t": np.where(np.arange(16) == 3, OFFSETS - 1, OFFSETS)}, "two draft ids to the same token"),
    "map of floats": ({"d2t": OFFSETS.astype(np.float32)}, "'d2t' in F32; allowed: I64, I32, BOOL"),
    "weights of integers": ({"norm__weight": np.ones(16, np.int64)}, "'norm.weight' in I64; allowed: BF16"),
    "another mask": ({"t2d": np.isin(np.arange(VOCAB_SIZE), IDS[1:])}, "'t2d' and 'd2t' that disagree on token 1"),
    "mask of another length": ({"t2d": np.ones(16, bool)}, r"'t2d' of shape \[16\]; the target asks for \[24\]"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_a_drafter_that_is_not_whole_is_refused(tmp_path: Path, name: str) -> None:
    changes, sentence = BAD_TENSORS[name]
    with pytest.raises(CheckpointError, match=sentence) as refused:
        add_drafter(TINY.target, {}, write_drafter(tmp_path, **changes), dtype="float32")
    assert str(refused.value).endswith(".")


def test_what_is_no_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model .*nowhere' of the speculative_config does not exist"):
        add_drafter(TINY.target, {}, tmp_path / "nowhere", dtype="float32")
    with pytest.raises(CheckpointError, match="family 'toy' hands out no layers"):
        add_drafter(ToyFamily(), {}, write_drafter(tmp_path), dtype="float32")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither .*\(pytorch_model.bin is not read; convert it\)"):
        add_drafter(TINY.target, {}, tmp_path, dtype="float32")


def test_a_model_with_its_drafter_from_disk(joined: Any, tmp_path: Path) -> None:
    target = {name: array for name, array in joined.items() if name != "drafter"}
    write_hf(TINY.target, target, TARGET_CONFIG, tmp_path / "target")
    drafter = write_drafter(tmp_path / "drafter")
    options: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 1, "prefill_chunk": 16, "dtype": "float32"}
    method = {"method": "eagle3", "num_speculative_tokens": 1}
    with pytest.raises(ConfigError, match="needs a drafter; give its checkpoint's folder as model"):
        LLM(tmp_path / "target", speculative_config=method, **options)
    with pytest.raises(ConfigError, match="which method 'ngram' has no use for"):
        LLM(tmp_path / "target", speculative_config={"method": "ngram", "model": drafter}, **options)
    llm = without_optimizations(
        lambda: LLM(tmp_path / "target", speculative_config={**method, "model": drafter}, **options)
    )
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12)
    (record, *_) = llm.trace([5, 1, 4], params)
    (out,) = llm.generate([[5, 1, 4]], params, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 12
    assert set(record.drafts) <= set(IDS.tolist())
