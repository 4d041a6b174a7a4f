"""GGUF files: the very weights of the same model in safetensors; quantised ones by the library; others refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mtp_jax.checkpoints import CheckpointError, load_model, save_hf_model, write_hf
from mtp_jax.models.registry import family_from_config
from mtp_jax.text import load_tokenizer
from tests.checkpoints.support import assert_same_bits
from tests.models.dense_goldens import CONFIGS, tensor_of
from tests.models.support import pack_weights

Q8_0 = gguf.GGMLQuantizationType.Q8_0
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MODELS: dict[str, dict[str, Any]] = {
    **{name: CONFIGS[name] for name in ("llama", "smollm2", "qwen2", "qwen3")},
    "llama3": CONFIGS["llama"]
    | {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "attention_bias": True, "head_dim": 8},
    "linear": CONFIGS["llama"] | {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
}


def tensors_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    family = family_from_config(config)
    shapes = {
        name: shape for spec in family.tensors() for name, shape in zip(spec.sources, spec.source_shapes, strict=True)
    }
    return {name: tensor_of(name, shape) for name, shape in shapes.items()}


def pairs_side_by_side(array: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp wants queries and keys of Llama models."""
    by_half = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(by_half.swapaxes(1, 2).reshape(array.shape))


def write_gguf(
    file: Path,
    config: dict[str, Any],
    add: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    *,
    quantise: bool = False,
) -> Path:
    """What a converter makes of the model, tensor names from the library's own table."""
    kind, num_layers = config["model_type"], config["num_hidden_layers"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config, scaling))
    add(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], num_layers)
    for name, array in tensors_of(config).items():
        if kind == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            array = pairs_side_by_side(array, num_heads if "q_proj" in name else num_kv_heads)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        if quantise and array.ndim == 2:
            writer.add_tensor(gguf_name, gguf.quantize(array, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(gguf_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def llama3_factors(config: dict[str, Any], scaling: dict[str, Any]) -> np.ndarray:
    """By what each frequency is divided."""
    factors = []
    for pair in range(config["head_dim"] // 2):
        frequency = config["rope_theta"] ** (-2 * pair / config["head_dim"])
        turns = 8192 * frequency / (2 * np.pi)
        smooth = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_model_in_safetensors_is_the_same_bits(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    family = family_from_config(config)
    write_hf(family, pack_weights(family.tensors(), tensors_of(config)), config, tmp_path / "hf")
    expected = load_model(tmp_path / "hf")
    actual = load_model(write_gguf(tmp_path / "model.gguf", config))
    assert actual.family == expected.family
    assert actual.dtype == "float32"
    assert_same_bits(actual.weights, expected.weights)
    save_hf_model(tmp_path / "model.gguf", tmp_path / "converted")
    converted = load_model(tmp_path / "converted")
    assert converted.family == expected.family
    assert_same_bits(converted.weights, expected.weights)


WIDE = CONFIGS["smollm2"] | {"hidden_size": 32, "intermediate_size": 32}


def test_quantised_tensors_become_plain_numbers(tmp_path: Path) -> None:
    """Those that the library says: it rounds in blocks along a row, so the order of rows does not matter."""
    family = family_from_config(WIDE)
    rounded = {
        name: gguf.dequantize(gguf.quantize(array, Q8_0), Q8_0) if array.ndim == 2 else array
        for name, array in tensors_of(WIDE).items()
    }
    loaded = load_model(write_gguf(tmp_path / "model.gguf", WIDE, quantise=True), dtype="float32")
    assert_same_bits(loaded.weights, pack_weights(family.tensors(), rounded))
    assert any((rounded[name] != array).any() for name, array in tensors_of(WIDE).items())
    assert load_model(tmp_path / "model.gguf").dtype == "bfloat16"


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", MODELS["llama"])
    whole = file.read_bytes()
    for damaged in (b"", whole[:3], b"GGML" + whole[4:], whole[:200], whole[: len(whole) - 2000]):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="truncated or no GGUF file") as refused:
            load_model(file)
        assert str(refused.value).endswith(".")
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf is missing"):
        load_model(tmp_path / "nowhere.gguf")
    with pytest.raises(CheckpointError, match="experts"):
        load_model(write_gguf(tmp_path / "moe.gguf", MODELS["llama"], lambda writer: writer.add_expert_count(8)))
    writer = gguf.GGUFWriter(tmp_path / "gemma.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'gemma'; allowed: 'llama', 'qwen2', 'qwen3'"):
        load_model(tmp_path / "gemma.gguf")


def stated(name: str, value: Any, kind: gguf.GGUFValueType) -> Callable[[gguf.GGUFWriter], None]:
    """Metadata, in place of what the writer has under that name."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0][name] = gguf.gguf_writer.GGUFValue(value, kind)

    return add


UINT32, FLOAT32, STRING, BOOL = (getattr(gguf.GGUFValueType, kind) for kind in ("UINT32", "FLOAT32", "STRING", "BOOL"))
NORM_SIZE = MODELS["llama"]["hidden_size"]


@pytest.mark.parametrize(
    ("add", "sentence"),
    [
        (stated("llama.attention.head_count", 0, UINT32), "has 0 heads over 16 channels"),
        (stated("llama.attention.head_count", "4", STRING), "has '4' heads over 16 channels"),
        (stated("llama.attention.key_length", "4", STRING), "key_length = '4'; it must be a whole number"),
        (stated("llama.rope.dimension_count", 2, UINT32), "rope.dimension_count = 2 with heads of 4 channels"),
        (stated("llama.attention.value_length", 9, UINT32), "value_length = 9 with heads of 4 channels"),
        (stated("llama.attention.sliding_window", 4, UINT32), "sliding_window = 4, which is not understood"),
        (stated("llama.attention.causal", False, BOOL), "causal = False, which is not understood"),
        (stated("llama.logit_scale", 8.0, FLOAT32), "logit_scale = 8.0, which is not understood"),
        (stated("llama.rope.scaling.type", "yarn", STRING), "no metadata llama.rope.scaling.factor"),
        (stated("tokenizer.chat_template", 5, UINT32), "chat template that is no text: 5"),
        (
            lambda writer: writer.add_tensor("model.norm.weight", np.full(NORM_SIZE, 9, np.float32)),
            "has tensor 'model.norm.weight' twice, once as",
        ),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(5, np.float32)), "not one positive factor"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.zeros(2, np.float32)), "not one positive factor"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    tmp_path: Path, add: Callable[[gguf.GGUFWriter], None], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        load_model(write_gguf(tmp_path / "model.gguf", MODELS["llama"], add))


def test_metadata_that_changes_nothing_is_let_through(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        stated("llama.rope.dimension_count", 4, UINT32)(writer)
        stated("llama.attention.causal", True, BOOL)(writer)
        stated("llama.attention.sliding_window", 0, UINT32)(writer)
        stated("general.source.url", "x", STRING)(writer)

    load_model(write_gguf(tmp_path / "model.gguf", MODELS["llama"], add))


def test_factors_of_another_scaling_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.checkpoints.test_gguf.llama3_factors", lambda *_: np.array([1, 2, 3, 4], np.float32))
    with pytest.raises(CheckpointError, match="whose factors are not those of Llama 3"):
        load_model(write_gguf(tmp_path / "model.gguf", MODELS["llama3"]))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"needs the package gguf to be read: pip install 'mtp-jax\[gguf\]'"):
        load_model(tmp_path / "model.gguf")


MERGES = ["h e", "l l", "he ll", "Ġ hell"]
TOKENS = [*"helo1 ", "Ġ", "he", "ll", "hell", "Ġhell", "<s>", "<|end|>", "!"]


def write_with_tokenizer(file: Path, cut: str, kind: str = "gpt2") -> Path:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre(cut)
        writer.add_token_list(TOKENS)
        writer.add_token_merges(MERGES)
        writer.add_token_types([3 if token in ("<s>", "<|end|>") else 1 for token in TOKENS])
        writer.add_bos_token_id(TOKENS.index("<s>"))
        writer.add_add_bos_token(cut == "llama-bpe")
        writer.add_chat_template("{{ messages }}")

    return write_gguf(file, CONFIGS["smollm2"] | {"vocab_size": len(TOKENS)}, add)


@pytest.mark.parametrize("cut", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_the_tokenizer_comes_along(cut: str, tmp_path: Path) -> None:
    file = write_with_tokenizer(tmp_path / "model.gguf", cut)
    tokenizer = load_model(file).tokenizer
    assert tokenizer is not None
    start = ["<s>"] if cut == "llama-bpe" else []
    assert tokenizer.encode("hello hell<|end|>11").tokens == [*start, "hell", "o", "Ġhell", "<|end|>", "1", "1"]
    assert tokenizer.decode(tokenizer.encode("hello hell!<|end|>").ids) == "hello hell!"
    save_hf_model(file, tmp_path / "folder")
    assert (tmp_path / "folder" / "chat_template.jinja").read_text() == "{{ messages }}"
    kept = load_tokenizer(tmp_path / "folder")
    assert kept is not None
    assert kept.to_str() == tokenizer.to_str()


@pytest.mark.parametrize(("cut", "kind"), [("deepseek-llm", "gpt2"), ("default", "llama")])
def test_an_unknown_tokenizer_is_named(cut: str, kind: str, tmp_path: Path) -> None:
    file = write_with_tokenizer(tmp_path / "model.gguf", cut, kind)
    with pytest.warns(UserWarning, match=rf"a tokenizer of the kind '{kind}' \('{cut}'\), which cannot be read"):
        assert load_model(file).tokenizer is None
