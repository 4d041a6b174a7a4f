"""The report: right numbers, one file that needs nothing else, and nothing of a result that becomes markup."""

import json
import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mtp_jax.cli.main import main
from mtp_jax.report import page, read_results
from tests.batch.toy_job import good_line, run_toy_batch

VOID = {"meta", "br", "hr", "img", "link", "input"}
INJECTION = '</pre><script>alert("1")</script><img src=x onerror=alert(2)>\x00\ud800&amp;'


def result(custom_id: str = "a", *, text: str = "ab", origins: str = "pd", **metrics: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": text,
        "token_ids": [1, 2],
        "finish_reason": "length",
        "token_origins": origins,
        "token_texts": [text[:1], text[1:]],
        "steps": [[3, 2, 2, 1, 1]],
    }
    numbers = {
        "num_steps": 1,
        "num_draft_tokens": 2,
        "num_accepted_tokens": 1,
        "accepted_per_pos": [1],
        "drafted_per_pos": [1, 1],
        "mean_acceptance_length": 2.0,
        "times_s": [1.0, 3.5],
        **metrics,
    }
    body = {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}, "metrics": numbers}
    return {"custom_id": custom_id, "response": {"status_code": 200, "body": body}, "error": None}


def refused(message: str) -> dict[str, Any]:
    return {"custom_id": None, "response": {"status_code": 400, "body": {}}, "error": {"code": "x", "message": message}}


def page_of(*results: dict[str, Any], title: str = "results.jsonl") -> str:
    return page(read_results(json.dumps(one).encode() for one in results), title)


class Strict(HTMLParser):
    """Knows which elements there are, and that each is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def parsed(html: str) -> Strict:
    parser = Strict()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


def test_a_page_needs_nothing_from_elsewhere() -> None:
    html = page_of(result(), refused("no"))
    seen = parsed(html).seen
    assert {tag for tag, _ in seen} & {"script", "link", "img", "iframe", "object", "base", "form"} == set()
    names = {name for _, attributes in seen for name in attributes}
    assert names & {"src", "href", "style", "srcset", "xlink:href", "action"} == set()
    assert not [name for name in names if name.startswith("on")]
    assert not re.search(r"https?://|url\(|@import", html)
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html


def test_nothing_of_a_result_becomes_markup() -> None:
    hostile = result(INJECTION, text=INJECTION, finish_reason=INJECTION)
    hostile["response"]["body"]["choices"][0]["finish_reason"] = INJECTION
    html = page_of(hostile, refused(INJECTION), title=INJECTION)
    parser = parsed(html)
    assert {tag for tag, _ in parser.seen} & {"script", "img"} == set()
    assert parser.words.count("<script>") >= 5  # as words: title, heading, custom_id, text, ended by, message
    assert "\x00" not in html
    html.encode()
    plain = result(text=INJECTION)
    plain["response"]["body"]["choices"][0]["token_origins"] = '"><script>'
    assert "<script>" not in page_of(plain)


def test_the_numbers_are_the_results() -> None:
    findings = read_results(
        json.dumps(one).encode()
        for one in [result("a"), result("b", times_s=[0.0, 9.0]), refused("no"), refused("no"), refused("never")]
    )
    assert (findings.num_lines, findings.num_answered, findings.num_refused) == (5, 2, 3)
    assert findings.tokens_a_step == 2.0
    assert findings.acceptance == [(1.0, 2), (0.0, 2)]
    assert findings.draft_lens == {3: (4, 2)}
    assert findings.errors == {"no": 2, "never": 1}
    assert [(answer.custom_id, answer.seconds) for answer in findings.slowest] == [("b", 9.0), ("a", 2.5)]
    words = parsed(page(findings, "x")).words
    assert "drafted and accepted" in words
    assert "50.0%" in words


def test_only_so_many_answers_are_kept() -> None:
    lines = [json.dumps(result(f"{number}", times_s=[0, number % 7])).encode() for number in range(50)]
    findings = read_results(lines, num_shown=3)
    assert [answer.custom_id for answer in findings.first] == ["0", "1", "2"]
    assert [answer.seconds for answer in findings.slowest] == [6, 6, 6]


@pytest.mark.parametrize("line", [b"x", b"[]", b"{}", b'{"error": null}', json.dumps(result(num_steps="x")).encode()])
def test_what_is_no_result_is_named(line: bytes) -> None:
    with pytest.raises(ValueError, match="line 2 is no result of run-batch"):
        read_results([json.dumps(result()).encode(), line])


def test_a_run_with_origins_says_how_its_tokens_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(good_line(number) for number in range(12)))
    run_toy_batch(source, output, wants_origins=True)
    letters = ""
    for line in output.read_text().splitlines():
        body = json.loads(line)["response"]["body"]
        (choice,) = body["choices"]
        metrics = body["metrics"]
        assert len(choice["token_origins"]) == len(choice["token_ids"])
        assert choice["token_origins"].count("d") == metrics["num_accepted_tokens"]
        assert choice["token_origins"][0] == "p"
        assert len(choice["steps"]) == metrics["num_steps"]
        assert sum(step[4] for step in choice["steps"]) == len(choice["token_ids"]) - 1
        assert 0 <= metrics["times_s"][0] <= metrics["times_s"][1]
        letters += choice["token_origins"]
    assert {*letters} == {"d", "c", "p"}
    assert main(["report", str(output)]) == 0
    html = (tmp_path / "out.html").read_text()
    assert capsys.readouterr().out.strip() == str(tmp_path / "out.html")
    assert "Not recorded" not in html
    assert len(re.findall(r'<span class="t [dcp]"', html)) == len(letters) + 3
    assert main(["report", str(source)]) == 2
    assert "in.jsonl: line 1 is no result of run-batch" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the command chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_it_in_light_and_dark(tmp_path: Path, scheme: str) -> None:
    """No error on the console, and a background that is light or dark as asked."""
    html = tmp_path / "page.html"
    html.write_text(page_of(*[result(f"request-{number}", text="text " * 30) for number in range(5)], refused("no")))
    picture = tmp_path / f"{scheme}.png"
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=900,1400"]
    command += ["--enable-logging=stderr", f"--screenshot={picture}", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    ended = subprocess.run([*command, html.as_uri()], capture_output=True, text=True, timeout=180, check=True)
    assert "CONSOLE" not in ended.stderr
    assert brightness_of_first_pixel(picture) > 200 if scheme == "light" else brightness_of_first_pixel(picture) < 50


def brightness_of_first_pixel(picture: Path) -> float:
    """Of a PNG with 8 bits a channel. Whatever filter its first row has, the first pixel stands there as it is."""
    data = picture.read_bytes()
    found, start = b"", 8
    while start < len(data):
        length, kind = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8]
        found += data[start + 8 : start + 8 + length] if kind == b"IDAT" else b""
        start += length + 12
    return sum(zlib.decompress(found)[1:4]) / 3
