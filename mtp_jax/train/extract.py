"""From files to plain text. Each extractor takes the bytes of one file and yields (document name suffix, text)."""

import ast
import gzip
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser

Extractor = Callable[[bytes], Iterator[tuple[str, str]]]

_PLAIN_PUNCTUATION = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2026": "...",
        "\u2013": "-",
        "\u2014": "--",
        "\u00a0": " ",
        "\u00b6": "",
        "\ufeff": "",
    }
)


_HIDDEN_RST_LINES = re.compile(
    r"^\s*\.\. (_[^\n]*:|index::[^\n]*|\|[^\n]*|sectionauthor[^\n]*|moduleauthor[^\n]*)\n", re.M
)


def normalise(text: str) -> str:
    r"""NFC, plain quotes and dashes, LF line ends, no trailing blanks, at most one empty line in a row.

    >>> normalise("\u201ca\u201d  \r\n\n\n\nb")
    '"a"\n\nb\n'
    """
    text = unicodedata.normalize("NFC", text).translate(_PLAIN_PUNCTUATION)
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n").replace("\0", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def plain(data: bytes) -> Iterator[tuple[str, str]]:
    """The file as it is (gunzipped where it is gzip)."""
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    yield "", data.decode("utf-8", errors="replace")


def rst(data: bytes) -> Iterator[tuple[str, str]]:
    """A reStructuredText source with the markup that readers never see taken out (roles, index and label lines)."""
    for suffix, text in plain(data):
        text = _HIDDEN_RST_LINES.sub("", text)
        text = re.sub(r":[a-z][\w:+.-]*:`[!~]?([^`<]*?)(?:\s*<[^`>]*>)?`", r"\1", text)
        text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`__?", r"\1", text)
        yield suffix, text.replace("``", "`")


def html(data: bytes) -> Iterator[tuple[str, str]]:
    """Headings, paragraphs, lists, table rows and preformatted blocks of a page, without navigation and scripts."""
    for suffix, text in plain(data):
        page = _Page()
        page.feed(text)
        page.close()
        yield suffix, "\n\n".join(page.blocks)


def python(data: bytes) -> Iterator[tuple[str, str]]:
    """Source code as it is, if it is valid UTF-8 Python; nothing otherwise."""
    try:
        text = data.decode("utf-8")
        ast.parse(text)
    except (ValueError, SyntaxError, RecursionError):
        return
    yield "", text


def json_text(data: bytes) -> Iterator[tuple[str, str]]:
    """The values of all "text" keys of a JSON file, each under the path of its keys (a fact book's entries)."""

    def walk(node: object, path: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                if key == "text" and isinstance(value, str):
                    yield f"{': '.join(path)}: {value.replace(' ++ ', chr(10))}"
                else:
                    yield from walk(value, (*path, key))

    yield "", "\n\n".join(walk(json.loads(data), ()))


def dictionary(data: bytes) -> Iterator[tuple[str, str]]:
    """A dictd dictionary: entries in groups of forty, each group a document."""
    for _, text in plain(data):
        entries = re.split(r"\n(?=[^\s].*\n)", text)
        for start in range(0, len(entries), 40):
            yield f"#{start // 40}", "\n\n".join(entry.strip("\n") for entry in entries[start : start + 40])


def triple_quoted(data: bytes) -> Iterator[tuple[str, str]]:
    """The long string literals of a Python file (a book shipped as a module), in parts of about 20,000 characters."""
    tree = ast.parse(data.decode("utf-8"))
    strings = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    text = "\n".join(s for s in strings if len(s) > 10_000).replace("[", "").replace("]", "")
    lines: list[str] = []
    size, part = 0, 0
    for line in re.sub(r" {2,}", " ", text).splitlines():
        lines.append(line)
        size += len(line)
        if size > 20_000:
            yield f"#{part}", "\n".join(lines)
            lines, size, part = [], 0, part + 1
    yield f"#{part}", "\n".join(lines)


EXTRACTORS: Mapping[str, Extractor] = {
    "plain": plain,
    "rst": rst,
    "html": html,
    "python": python,
    "json_text": json_text,
    "dictionary": dictionary,
    "triple_quoted": triple_quoted,
}


class _Page(HTMLParser):
    """Collects the text of block elements; text outside of them (menus, mostly) is dropped."""

    _BLOCKS = frozenset({"p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "dt", "dd", "blockquote", "pre", "tr", "div"})
    _TEXT = _BLOCKS - {"div"}
    _SKIPPED = frozenset({"script", "style", "nav", "aside", "header", "footer", "button", "svg", "head", "form"})
    _VOID = frozenset({"br", "img", "hr", "input", "link", "meta", "col", "wbr", "area", "base", "embed", "source"})
    _MENUS = re.compile(
        r"nav|toc|menu|sidebar|topbar|footer|breadcrumb|lang|quickview|related|headerlink|line-?no|copyright"
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self._open: list[str] = []
        self._skip_from: int | None = None
        self._text: list[str] = []
        self._linked = 0
        self._length = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._VOID:
            if tag == "br":
                self._text.append("\n")
            return
        if tag in self._BLOCKS and self._skip_from is None:
            self._end_block()
        if tag in ("td", "th"):
            self._text.append("  ")
        self._open.append(tag)
        # The page's own frame carries theme names ("sidebar-visible") that say nothing about its content.
        named = () if tag in ("html", "body", "main") else ("class", "id", "role")
        marks = " ".join(value or "" for name, value in attrs if name in named)
        if self._skip_from is None and (tag in self._SKIPPED or self._MENUS.search(marks.lower())):
            self._skip_from = len(self._open)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self._open:
            return
        while self._open:
            if self._skip_from is None and self._open[-1] in self._BLOCKS:
                self._end_block()
            if self._skip_from == len(self._open):
                self._skip_from = None
            if self._open.pop() == tag:
                break

    def handle_data(self, data: str) -> None:
        if self._skip_from is None and not self._TEXT.isdisjoint(self._open):
            self._text.append(data)
            self._length += len(data.strip())
            if "a" in self._open:
                self._linked += len(data.strip())

    def close(self) -> None:
        super().close()
        self._end_block()

    def _end_block(self) -> None:
        text, in_pre, tag = "".join(self._text), "pre" in self._open, self._open[-1] if self._open else ""
        is_menu = tag in ("li", "tr", "p", "dt", "dd") and self._linked > 0.8 * self._length
        self._text, self._linked, self._length = [], 0, 0
        if is_menu or not text.strip():
            return
        if not in_pre:
            text = re.sub(r"\s+", " ", text).strip()
            text = f"- {text}" if "li" in self._open else text
        self.blocks.append(text.strip("\n"))
