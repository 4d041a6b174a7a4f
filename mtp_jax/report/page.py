"""The report as one HTML page: no script, nothing from elsewhere, and nothing of a result line unescaped."""

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from mtp_jax.report.charts import bars, line
from mtp_jax.report.reading import Answer, Findings

_NAMES = {"d": "drafted and accepted", "c": "corrected", "p": "plain"}
_MEANINGS = {
    "d": "a draft that the target would have written too",
    "c": "the target's own token, in place of a draft that was refused",
    "p": "the target's own token where none was refused: after the prompt, after drafts that all stood, without drafts",
}
_MOST_POINTS = 160
_NOT_RECORDED = '<p class="note">Not recorded: run-batch writes it with <code>--token-origins</code>.</p>'
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(findings: Findings, title: str) -> str:
    """The whole page. `title` is what it is about, such as the name of the results' file."""
    style = files("mtp_jax.report").joinpath("style.css").read_text(encoding="utf-8")
    body = "".join(
        [
            f"<h1>{_text(title)}</h1>",
            _figures(findings),
            _section("Drafts accepted, by position", _acceptance(findings)),
            _section("Draft length K over time", _draft_lens(findings)),
            _section("How tokens came", _origins(findings)),
            _section("Slowest requests", _slowest(findings)),
            _section("First answers", _answers(findings.first)),
            _section("What was refused or failed", _errors(findings)) if findings.errors else "",
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{_text(title)}</title>'
        f"<style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{heading}</h2>{content}</section>"


def _figures(findings: Findings) -> str:
    share = f"{findings.num_accepted / findings.num_drafted:.0%}" if findings.num_drafted else "no drafts"
    figures = [
        ("lines", f"{findings.num_lines:,}"),
        ("answered", f"{findings.num_answered:,}"),
        ("refused or failed", f"{findings.num_refused + findings.num_failed:,}"),
        ("tokens written", f"{findings.num_completion_tokens:,}"),
        ("tokens a step", f"{findings.tokens_a_step:.2f}"),
        ("drafts accepted", share),
    ]
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures) + "</dl>"


def _acceptance(findings: Findings) -> str:
    if not findings.acceptance:
        return '<p class="note">Nothing was drafted.</p>'
    shares = [
        (str(place), share, f"draft {place}: {share:.1%} of {count:,} accepted")
        for place, (share, count) in enumerate(findings.acceptance, start=1)
    ]
    return bars(shares, x_title="draft of a step; a share of the drafts made there")


def _draft_lens(findings: Findings) -> str:
    if not findings.draft_lens:
        return _NOT_RECORDED
    by_launch = [total / count for _, (total, count) in sorted(findings.draft_lens.items())]
    size = -(-len(by_launch) // _MOST_POINTS)
    means = [
        sum(by_launch[start : start + size]) / len(by_launch[start : start + size])
        for start in range(0, len(by_launch), size)
    ]
    title = f"{len(by_launch):,} decode steps" + (f", means of {size}" if size > 1 else "")
    return line(means, x_title=title, largest=math.ceil(max(by_launch)))


def _origins(findings: Findings) -> str:
    total = findings.origins.total()
    if not total:
        return _NOT_RECORDED
    rows = "".join(
        f'<li><span class="t {letter}">{name}</span> {findings.origins[letter] / total:.1%}: {_MEANINGS[letter]}</li>'
        for letter, name in _NAMES.items()
    )
    return f'<ul class="legend">{rows}</ul>'


def _slowest(findings: Findings) -> str:
    if not findings.slowest:
        return _NOT_RECORDED
    rows = "".join(
        f"<tr><td>{_text(answer.custom_id)}</td><td>{answer.seconds:.2f}</td><td>{answer.num_tokens}</td>"
        f"<td>{answer.tokens_a_step:.2f}</td><td>{_text(answer.finish_reason)}</td></tr>"
        for answer in findings.slowest
    )
    return _table(("custom_id", "seconds, with its wait", "tokens", "tokens a step", "ended by"), rows)


def _answers(answers: Sequence[Answer]) -> str:
    if not answers:
        return '<p class="note">No line was answered.</p>'
    return "".join(
        f"<article><h3>{_text(answer.custom_id)}</h3>"
        f'<p class="note">{answer.num_tokens} tokens, {answer.tokens_a_step:.2f} a step</p>'
        f"<pre>{_tokens(answer)}</pre></article>"
        for answer in answers
    )


def _tokens(answer: Answer) -> str:
    """Each token in the colour of how it came."""
    if answer.origins is None or len(answer.origins) != len(answer.pieces):
        return _text(answer.text)
    each = [
        (letter if letter in _NAMES else "p", piece)
        for letter, piece in zip(answer.origins, answer.pieces, strict=True)
    ]
    return "".join(f'<span class="t {letter}" title="{_NAMES[letter]}">{_text(piece)}</span>' for letter, piece in each)


def _errors(findings: Findings) -> str:
    rows = "".join(
        f"<tr><td>{count:,}</td><td>{_text(message)}</td></tr>" for message, count in findings.errors.most_common(20)
    )
    return _table(("lines", "why"), rows)


def _table(names: Sequence[str], rows: str) -> str:
    heads = "".join(f"<th>{name}</th>" for name in names)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _text(text: str) -> str:
    """Escaped; what no page may hold (control characters, lone surrogates) is shown as a replacement character."""
    shown = "".join(
        "\ufffd" if (character < " " and character not in "\n\t") or "\ud800" <= character <= "\udfff" else character
        for character in text
    )
    return escape(shown)
