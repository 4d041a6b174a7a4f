"""The tokenizer that a GGUF file carries, as one of the `tokenizers` package.

Byte-level BPE, as Llama 3, Qwen and SmolLM have it. How a text is cut into pieces before merges is not in the file: it
has a name there, and what the names mean is written below for those that are known here.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of token that are found in a text before anything else; the first are left out of decoded text."""
_WORDS_OF_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_tokenizer(file: Path, metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a file's metadata; None where it has none, or (with a warning) one of an unknown kind."""
    tokens, kind = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.model")
    if tokens is None or kind is None:
        return None
    cut = metadata.get("tokenizer.ggml.pre", "gpt-2")
    pieces = _pieces(cut)
    if kind != "gpt2" or pieces is None:
        warnings.warn(
            f"{file} has a tokenizer of the kind {kind!r} ({cut!r}), which cannot be read; its model takes token ids.",
            stacklevel=2,
        )
        return None
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut == "llama-bpe"))
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    types = metadata.get("tokenizer.ggml.token_type", [0] * len(tokens))

    def of_type(wanted: int) -> list[AddedToken]:
        is_special = wanted == _CONTROL
        typed = zip(tokens, types, strict=True)
        return [AddedToken(token, special=is_special, normalized=False) for token, kind in typed if kind == wanted]

    tokenizer.add_special_tokens(of_type(_CONTROL))
    tokenizer.add_tokens(of_type(_USER_DEFINED))
    first = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", False) and first is not None:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{tokens[first]} $A", special_tokens=[(tokens[first], first)]
        )
    return tokenizer


def _pieces(cut: str) -> list[Any] | None:
    """How text is cut before merges; None for a name that is not known."""
    whole_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if cut in ("gpt-2", "default"):
        return [by_gpt2]
    if cut == "smollm":
        return [pre_tokenizers.Digits(individual_digits=True), by_gpt2]
    digits = {"llama-bpe": "{1,3}", "qwen2": ""}.get(cut)
    if digits is None:
        return None
    words = Regex(_WORDS_OF_LLAMA3.replace("{DIGITS}", digits))
    return [pre_tokenizers.Split(words, behavior="isolated"), whole_bytes]
