"""Between token ids and text: incremental detokenization, and stop strings that may span tokens and steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mtp_jax.checkpoints import LoadedModel
from mtp_jax.core.config import SamplingParams
from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.requests import Cut

_UNFINISHED = "\ufffd"
"""What decoders show for bytes that are no character, or not yet."""


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's `tokenizer.json`, or None when it has none (token ids only). `ConfigError` for a damaged one."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare `Exception` for a damaged file
        raise ConfigError(f"{file} is no tokenizer: {error}.") from None


def tokenizer_of(loaded: LoadedModel) -> Tokenizer | None:
    """The tokenizer that came with the weights, or else the folder's."""
    return load_tokenizer(loaded.folder) if loaded.tokenizer is None else loaded.tokenizer


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of `text`. `ConfigError` for a lone surrogate, such as a byte of the command line that is no UTF-8."""
    _check_surrogates("The prompt", text)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def _check_surrogates(what: str, text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{what} contains a lone surrogate; it must be text that UTF-8 can write.")


def in_tokens(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """The parameters with bad words as token ids: text as it stands at the beginning of a text, and after a space.

    The second only where it has as many tokens and begins otherwise, as in vLLM. What is no list of words, or text
    without a tokenizer, is left for admission to name. `ConfigError` for a word that UTF-8 cannot write, and for one
    that is white space alone.
    """
    words = params.bad_words
    if tokenizer is None or isinstance(words, str) or not isinstance(words, Sequence):
        return params
    found: list[Sequence[int]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(word)
            continue
        if not word.lstrip():
            raise ConfigError(
                f"bad_words contains {word!r}; a word must have more than white space, or be a list of token ids."
            )
        bare, spaced = (_bare_ids(tokenizer, prefix + word.lstrip()) for prefix in ("", " "))
        found.append(bare)
        if spaced and len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return replace(params, bad_words=found)


def _bare_ids(tokenizer: Tokenizer, word: str) -> list[int]:
    _check_surrogates("A bad word", word)
    return tokenizer.encode(word, add_special_tokens=False).ids


def pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; a character that several make up is the last one's. Joined they are the text."""
    stream = DecodeStream(skip_special_tokens=True)
    return [stream.step(tokenizer, token) or "" for token in tokens]


class Detokenizer:
    """Text of a growing list of tokens, the same however the tokens arrive; also a `TokenWatcher` for stop strings.

    `text` grows by whole characters: bytes of an unfinished one are held back until `finish`. A stop string ends the
    text before it, at the token that completes it, even if that token goes on into an unfinished character; of several
    completed by one token, the one that begins first counts. Those that the first `min_tokens` tokens complete do not.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.text = ""
        self._min_tokens = min_tokens
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop_strings = tuple(stop_strings)
        self._longest_stop = max(map(len, self._stop_strings), default=0)
        self._tokens: list[int] = []
        self._num_shown = 0  # tokens whose text is in `text`
        self._num_searched = 0  # characters in which there is no stop string, or none that counts
        self._is_cut = False
        self._is_finished = False

    @property
    def settled_text(self) -> str:
        """The text that no stop string can take back: what a stream may show."""
        if self._is_cut or self._is_finished or self._longest_stop == 0:
            return self.text
        return self.text[: max(len(self.text) - self._longest_stop + 1, 0)]

    def feed(self, tokens: Sequence[int]) -> Cut | None:
        """Appends tokens; the cut if one of them completes a stop string."""
        for index, token in enumerate(tokens):
            self._tokens.append(token)
            piece = self._stream.step(self._tokenizer, token)
            if piece:
                self.text += piece
                self._num_shown = len(self._tokens)
            found = self._find_stop(self.text if piece else self.text + self._held_back())
            if found is not None:
                self.text, stop = found
                self._is_cut = True
                return Cut(num_tokens=index + 1, stop_reason=stop)
        return None

    def finish(self) -> None:
        """Appends what was held back of an unfinished character, as the tokenizer shows it."""
        self._is_finished = True
        whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if not self._is_cut and whole.startswith(self.text):
            self.text = whole

    def _held_back(self) -> str:
        """The whole characters of tokens that end inside one: `DecodeStream` gives them only with its end."""
        if not self._stop_strings:
            return ""
        held = self._tokens[self._num_shown :]
        return self._tokenizer.decode(held, skip_special_tokens=True).rstrip(_UNFINISHED)

    def _find_stop(self, text: str) -> tuple[str, str] | None:
        """The text before the first stop string that ends in what is new of `text`, and that string."""
        num_known, self._num_searched = self._num_searched, len(text)
        if len(self._tokens) <= self._min_tokens:
            return None
        found = [(text.find(stop, max(num_known - len(stop) + 1, 0)), stop) for stop in self._stop_strings]
        first = min(((start, stop) for start, stop in found if start >= 0), default=None)
        return None if first is None else (text[: first[0]], first[1])
