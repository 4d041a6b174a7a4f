"""Examples in docstrings as code: Markdown would read ``>>>`` as a quotation in a quotation."""

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Fences each example, from its first prompt to the next blank line."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    r"""The text with its examples in fences.

    >>> fenced("Doubles.\n\n>>> 2 * 2\n4\n\nMore.").splitlines()
    ['Doubles.', '', '```pycon', '>>> 2 * 2', '4', '```', '', 'More.']
    """
    lines: list[str] = []
    is_inside = False
    for line in [*text.splitlines(), ""]:
        if is_inside and not line.strip():
            lines.append("```")
            is_inside = False
        elif not is_inside and line.startswith(">>>"):
            lines.append("```pycon")
            is_inside = True
        lines.append(line)
    return "\n".join(lines).rstrip()
