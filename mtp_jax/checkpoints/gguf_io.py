"""Reading models of the Llama family from GGUF files: their metadata as a `config.json`, their tensors by its names.

Quantised tensors are made plain numbers, whatever the quantisation, by the `gguf` package. Two things are undone that
its writers do: for Llama the rows of queries and keys stand with the channels of a rotary pair side by side, here half
a head apart; and Llama 3's rope scaling is a tensor of factors, here the few numbers that it was computed from.
"""

import re
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Float
from tokenizers import Tokenizer

from mtp_jax.checkpoints.errors import CheckpointError, odd_number
from mtp_jax.checkpoints.gguf_tokenizer import gguf_tokenizer
from mtp_jax.checkpoints.safetensors_io import StoredTensor
from mtp_jax.models.rope import Llama3Scaling

SUFFIX = ".gguf"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"
_DTYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16"}
"""Other types are numbers of 16 bits at most: bfloat16 holds their range."""
_LLAMA3_FIELDS = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Of every released Llama 3 with scaling; only the factor differs."""
_UNDERSTOOD = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("expert_count", "expert_used_count", "tensor_data_layout"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
)
"""Metadata of an architecture that is read, checked, or changes nothing."""
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_gguf(model: str | Path) -> bool:
    """Whether a model's name says that it is such a file."""
    return Path(model).suffix == SUFFIX


class GgufReader:
    """The tensors of a file by the names of Hugging Face layout, as `SafetensorsReader` has them.

    `config`: what a `config.json` would say. `tokenizer`: the file's own, if it can be read. Entering maps the file;
    `CheckpointError` if that cannot be done or the architecture is none of `ARCHITECTURES`.

    >>> with GgufReader(Path("SmolLM2-135M.Q8_0.gguf")) as reader:       # doctest: +SKIP
    ...     reader.config["model_type"], reader.read("model.norm.weight").shape
    """

    def __init__(self, file: Path) -> None:
        self.folder = file
        self.config: dict[str, Any] = {}
        self.tokenizer: Tokenizer | None = None
        self.chat_template: str | None = None
        self.tensors: dict[str, StoredTensor] = {}
        self._stored: dict[str, Any] = {}

    def __enter__(self) -> "GgufReader":
        opened = _opened(self.folder)
        for tensor in opened.tensors:
            if tensor.name == ROPE_FACTORS:
                continue
            name = hf_name(tensor.name)
            if name in self.tensors:
                raise CheckpointError(f"{self.folder} has tensor {name!r} twice, once as {tensor.name!r}.")
            shape = tuple(int(size) for size in reversed(tensor.shape))
            self._stored[name] = tensor
            self.tensors[name] = StoredTensor(self.folder, shape, _DTYPES.get(tensor.tensor_type.name, "bfloat16"))
        factors = next((_plain(tensor) for tensor in opened.tensors if tensor.name == ROPE_FACTORS), None)
        metadata = {name: field.contents() for name, field in opened.fields.items() if not name.startswith("GGUF.")}
        self.config = _config(self.folder, metadata, self.tensors, factors)
        self.tokenizer = gguf_tokenizer(self.folder, metadata)
        self.chat_template = metadata.get("tokenizer.chat_template")
        if not isinstance(self.chat_template, str | None):
            raise CheckpointError(f"{self.folder} has a chat template that is no text: {self.chat_template!r}.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stored.clear()

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.folder.stat().st_size

    @property
    def dtype(self) -> str:
        """That of the embedding: norms are float32 in every file."""
        return self.tensors["model.embed_tokens.weight"].dtype

    def read(self, name: str) -> np.ndarray:
        """One tensor, a fresh array; quantised ones as float32. `CheckpointError` if it holds NaN or an infinity."""
        array = _plain(self._stored[name]).reshape(self.tensors[name].shape)
        if odd := odd_number(array):
            raise CheckpointError(f"{self.folder} has {odd} in tensor {name!r}; weights must be numbers.")
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if self.config["model_type"] != "llama" or heads is None:
            return array
        return halves_apart(array, self.config[heads])


def hf_name(name: str) -> str:
    """The name in Hugging Face layout, or the same where there is none.

    >>> hf_name("blk.3.attn_q.weight"), hf_name("output_norm.weight")
    ('model.layers.3.self_attn.q_proj.weight', 'model.norm.weight')
    """
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is None or layer[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"


def halves_apart(rows_RX: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows whose rotary pairs are neighbours within each head, with the pairs half a head apart.

    >>> halves_apart(np.array([0, 1, 2, 3, 4, 5, 6, 7]), 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    by_pair = rows_RX.reshape(num_heads, -1, 2, *rows_RX.shape[1:])
    return np.ascontiguousarray(by_pair.swapaxes(1, 2).reshape(rows_RX.shape))


def check_installed(what: str | Path) -> None:
    """`CheckpointError`, one sentence about `what`, without the package that reads GGUF files."""
    if find_spec("gguf") is None:
        raise CheckpointError(f"{what} needs the package gguf to be read: pip install 'mtp-jax[gguf]'.")


def _opened(file: Path) -> Any:
    check_installed(file)
    import gguf

    if not file.is_file():
        raise CheckpointError(f"{file} is missing.")
    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{file} is truncated or no GGUF file: {str(error).splitlines()[0]}.") from error


def _plain(tensor: Any) -> np.ndarray:
    from gguf import dequantize

    if tensor.tensor_type.name in _DTYPES:
        return np.array(tensor.data)
    return dequantize(tensor.data, tensor.tensor_type)


def _config(
    file: Path, metadata: Mapping[str, Any], names: Collection[str], factors_C: Float[np.ndarray, " C"] | None
) -> dict[str, Any]:
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{file} has the architecture {kind!r}; allowed: {', '.join(map(repr, ARCHITECTURES))} "
            "(others as a folder with safetensors)."
        )

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{kind}.{name}", default)
        if value is None:
            raise CheckpointError(f"{file} has no metadata {kind}.{name}.")
        return _as_written(value)

    num_heads, hidden_size = field("attention.head_count"), field("embedding_length")
    if field("expert_count", 0):
        raise CheckpointError(f"{file} has experts (metadata {kind}.expert_count), which family {kind!r} does not.")
    for name, value in metadata.items():
        own = name.removeprefix(f"{kind}.")
        is_neutral = value is True if own == "attention.causal" else value in (0, "", [])
        if own != name and own not in _UNDERSTOOD and not is_neutral:
            raise CheckpointError(f"{file} has metadata {name} = {value!r}, which is not understood here.")
    if not (isinstance(num_heads, int) and isinstance(hidden_size, int) and num_heads > 0):
        raise CheckpointError(
            f"{file} has {num_heads!r} heads over {hidden_size!r} channels; both must be whole numbers."
        )
    head_dim = field("attention.key_length", hidden_size // num_heads)
    if not isinstance(head_dim, int):
        raise CheckpointError(
            f"{file} has metadata {kind}.attention.key_length = {head_dim!r}; it must be a whole number."
        )
    for name in ("rope.dimension_count", "attention.value_length"):
        if field(name, head_dim) != head_dim:
            raise CheckpointError(
                f"{file} has metadata {kind}.{name} = {field(name)!r} with heads of {head_dim} channels."
            )
    tokens = metadata.get("tokenizer.ggml.tokens")
    config = {
        "model_type": kind,
        "hidden_size": hidden_size,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": field("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": field("vocab_size", None if tokens is None else len(tokens)),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base", 10000.0),
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in names,
        "tie_word_embeddings": "lm_head.weight" not in names,
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if factors_C is not None and (factors_C.shape != (head_dim // 2,) or not (factors_C > 0).all()):
        raise CheckpointError(
            f"{file} has tensor {ROPE_FACTORS!r}, which is not one positive factor for each frequency."
        )
    scaling = _rope_scaling(file, metadata, kind, config["rope_theta"], factors_C)
    return config if scaling is None else {**config, "rope_scaling": scaling}


def _as_written(value: Any) -> Any:
    """A float as the config had it: files have its nearest float32, and 1e-5 is not one.

    >>> _as_written(9.999999747378752e-06)
    1e-05
    """
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_scaling(
    file: Path, metadata: Mapping[str, Any], kind: str, theta: float, factors_C: Float[np.ndarray, " C"] | None
) -> dict[str, Any] | None:
    stated = metadata.get(f"{kind}.rope.scaling.type", "none")
    if factors_C is not None:
        factor = float(factors_C.max())
        frequencies_C = theta ** -(np.arange(len(factors_C)) / len(factors_C))
        llama3 = Llama3Scaling(factor, 8192, 1.0, 4.0)
        if not np.allclose(frequencies_C / factors_C, llama3.scale(frequencies_C, theta), rtol=1e-4):
            raise CheckpointError(f"{file} has tensor {ROPE_FACTORS!r}, whose factors are not those of Llama 3.")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3_FIELDS}
    if stated == "none":
        return None
    factor = _as_written(metadata.get(f"{kind}.rope.scaling.factor"))
    if factor is None:
        raise CheckpointError(f"{file} has rope scaling {stated!r} and no metadata {kind}.rope.scaling.factor.")
    original = metadata.get(f"{kind}.rope.scaling.original_context_length")
    fields = {"rope_type": stated, "factor": factor, "original_max_position_embeddings": original}
    return {name: value for name, value in fields.items() if value is not None}
