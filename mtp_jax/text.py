"""Between token ids and text: incremental detokenization, and stop strings that may span tokens and steps."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.requests import Cut


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's `tokenizer.json`, or None when it has none (token ids only). `ConfigError` for a damaged one."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare `Exception` for a damaged file
        raise ConfigError(f"{file} is no tokenizer: {error}.") from None


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text`. `ConfigError` for a lone surrogate, such as a byte of the command line that is no UTF-8."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError("The prompt contains a lone surrogate; it must be text that UTF-8 can write.")
    return tokenizer.encode(text).ids


class Detokenizer:
    """Text of a growing list of tokens, the same however the tokens arrive; also a `TokenWatcher` for stop strings.

    `text` grows by whole characters: bytes of an unfinished one are held back until `finish`. A stop string ends the
    text before it, at the token that completes it; of several completed by one token, the one that begins first counts.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop_strings = tuple(stop_strings)
        self._longest_stop = max(map(len, self._stop_strings), default=0)
        self._tokens: list[int] = []
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
            if not piece:
                continue
            searched_from = max(len(self.text) - self._longest_stop + 1, 0)
            self.text += piece
            found = self._find_stop(searched_from)
            if found is not None:
                start, stop = found
                self.text = self.text[:start]
                self._is_cut = True
                return Cut(num_tokens=index + 1, stop_reason=stop)
        return None

    def finish(self) -> None:
        """Appends what was held back of an unfinished character, as the tokenizer shows it."""
        self._is_finished = True
        whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if not self._is_cut and whole.startswith(self.text):
            self.text = whole

    def _find_stop(self, searched_from: int) -> tuple[int, str] | None:
        found = [(self.text.find(stop, searched_from), stop) for stop in self._stop_strings]
        return min(((start, stop) for start, stop in found if start >= 0), default=None)
