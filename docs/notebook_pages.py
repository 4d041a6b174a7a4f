"""A page for each notebook, with its outputs, made of the .ipynb when the site is built."""

import base64
import json
from pathlib import Path
from typing import Any

FOLDER = "notebooks"


def pages(root: Path) -> dict[str, str | bytes]:
    """Markdown pages and their images, by path in the site."""
    made: dict[str, str | bytes] = {}
    for path in sorted((root / FOLDER).glob("*.ipynb")):
        made |= pages_of(path.stem, json.loads(path.read_text()))
    return made


def pages_of(stem: str, notebook: dict[str, Any]) -> dict[str, str | bytes]:
    """One notebook's page, and an image for each plot."""
    images: dict[str, str | bytes] = {}
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else _fenced(source, "python"))
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{stem}_{len(images) + 1}.png"
                images[f"{FOLDER}/{name}"] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![plot]({name})")
            elif text := "".join(output.get("text", data.get("text/plain", ()))).rstrip():
                parts.append(_fenced(text, "text"))
    return {f"{FOLDER}/{stem}.md": "\n\n".join(parts) + "\n", **images}


def _fenced(text: str, language: str) -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text}\n{fence}"
