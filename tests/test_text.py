"""Stop strings end a text at the token that completes them, wherever bytes, tokens and steps are split."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.errors import ConfigError
from mtp_jax.text import Detokenizer, in_tokens


def byte_symbols() -> dict[int, str]:
    """How byte-level tokenizers write each byte: printable ones as they are, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


SYMBOLS = byte_symbols()


def tokenizer_of(pieces: Sequence[bytes]) -> tuple[Tokenizer, list[int]]:
    """A byte-level tokenizer that has these pieces as tokens, and their ids."""
    names = ["".join(SYMBOLS[byte] for byte in piece) for piece in pieces]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, [vocabulary[name] for name in names]


def cut_up(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    ends = sorted({cut for cut in cuts if 0 < cut < len(data)})
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


def expected_cut(pieces: Sequence[bytes], stops: Sequence[str], min_tokens: int = 0) -> tuple[int, str, str] | None:
    """(tokens, text, stop) by the definition: after each token, look for each stop in the whole characters so far.

    A place where one stands by the `min_tokens`-th token does not count later either.
    """
    visible = ""
    for num_tokens in range(1, len(pieces) + 1):
        before, visible = visible, b"".join(pieces[:num_tokens]).decode(errors="ignore")
        found = [
            (start, stop)
            for stop in stops
            for start in range(len(visible) - len(stop) + 1)
            if visible.startswith(stop, start) and start + len(stop) > len(before)
        ]
        if found and num_tokens > min_tokens:
            start, stop = min(found)
            return num_tokens, visible[:start], stop
    return None


TEXTS = st.text("ab é€🙂", min_size=1, max_size=12)


@given(
    text=TEXTS,
    cuts=st.lists(st.integers(1, 40), max_size=20),
    steps=st.lists(st.integers(1, 40), max_size=8),
    stops=st.lists(st.text("ab é€🙂", min_size=1, max_size=4), max_size=3),
    min_tokens=st.sampled_from((0, 0, 1, 2, 5)),
)
@example(text="ab€", cuts=[1, 3], steps=[], stops=["b"], min_tokens=0)  # what completes the stop begins a character
@example(text="ab€", cuts=[1, 3], steps=[], stops=["b"], min_tokens=2)  # and does not complete it once more
@example(text="ab€", cuts=[1, 3], steps=[1, 2], stops=["ab"], min_tokens=0)
@example(text="abab", cuts=[1, 2, 3], steps=[], stops=["b", "aba"], min_tokens=2)  # the longer one began before
@example(text="a🙂b🙂", cuts=[3, 7], steps=[], stops=["🙂b"], min_tokens=0)  # begins in a token, ends in one
def test_a_stop_string_cuts_at_the_token_that_completes_it(
    text: str, cuts: list[int], steps: list[int], stops: list[str], min_tokens: int
) -> None:
    pieces = cut_up(text.encode(), cuts)
    tokenizer, tokens = tokenizer_of(pieces)
    detokenizer = Detokenizer(tokenizer, stops, min_tokens)
    bounds = [0, *sorted({step for step in steps if step < len(tokens)}), len(tokens)]
    expected = expected_cut(pieces, stops, min_tokens)
    shown = ""
    for start, end in itertools.pairwise(bounds):
        cut = detokenizer.feed(tokens[start:end])
        assert detokenizer.settled_text.startswith(shown)
        shown = detokenizer.settled_text
        if cut is not None:
            assert expected == (start + cut.num_tokens, detokenizer.text, cut.stop_reason)
            assert expected is not None
            detokenizer.finish()
            assert detokenizer.text == expected[1]
            return
    assert expected is None
    detokenizer.finish()
    assert detokenizer.text == text


def test_a_stop_before_an_unfinished_character_counts_although_nothing_follows() -> None:
    """The last token that max_tokens allows completes the stop: the text must not show it."""
    pieces = [b"one ", b"stop\xe2\x82"]
    tokenizer, tokens = tokenizer_of(pieces)
    detokenizer = Detokenizer(tokenizer, ["stop"])
    cut = detokenizer.feed(tokens)
    assert cut is not None
    assert (cut.num_tokens, cut.stop_reason) == (2, "stop")
    detokenizer.finish()
    assert detokenizer.text == "one "


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_unfinished_character_is_shown_when_the_text_ends(num_bytes: int) -> None:
    pieces = [b"ab", "🙂".encode()[:num_bytes]]
    tokenizer, tokens = tokenizer_of(pieces)
    detokenizer = Detokenizer(tokenizer, ["x"])
    assert detokenizer.feed(tokens) is None
    assert detokenizer.text == "ab"
    detokenizer.finish()
    assert detokenizer.text == "ab\ufffd"


def test_words_that_decoders_join_with_spaces_are_found_with_them() -> None:
    """A decoder that drops the space in front of a text's first word, and keeps that of every other one."""
    vocabulary = {"▁one": 0, "▁stop": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    detokenizer = Detokenizer(tokenizer, ["€ stop"])
    cut = detokenizer.feed([0, 2, 3, 4, 1, 2])
    assert cut is not None
    assert (cut.num_tokens, detokenizer.text) == (5, "one")


def test_a_bad_word_is_meant_at_the_beginning_of_a_text_and_after_a_space() -> None:
    """After a space only where that makes as many tokens and another first one; token ids pass as they are."""
    vocabulary = {"x": 0, "y": 1, " x": 2, " ": 3, "ab": 4, " ab": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="y"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" ?ab| ?x|."), "isolated")

    def banned(*words: str | list[int]) -> list[list[int]]:
        return [list(word) for word in in_tokens(SamplingParams(bad_words=words), tokenizer).bad_words or ()]  # type: ignore[arg-type]

    assert banned("x", " ab", [7, 8]) == [[0], [2], [4], [5], [7, 8]]
    assert banned("y") == [[1]]  # " y" is two tokens
    assert banned("xy") == [[0, 1], [2, 1]]
    assert in_tokens(SamplingParams(bad_words=["x"]), None).bad_words == ["x"]
    with pytest.raises(ConfigError, match="A bad word contains a lone surrogate"):
        banned("\ud800")
    for blank in ("", " ", "\n\t"):
        with pytest.raises(ConfigError, match=r"^bad_words contains '.*'; a word must have more than white space"):
            banned(blank)
