"""Small SVG charts, drawn by hand: bars, and a line over time. Colours come from the page's style sheet."""

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 22, 34


def bars(shares: Sequence[tuple[str, float, str]], *, x_title: str) -> str:
    """A bar for each (label, share from 0 to 1, what its tooltip says), with its share above it."""
    room = (WIDTH - _LEFT - _RIGHT) / max(len(shares), 1)
    width = min(room * 0.6, 72)
    drawn = list[str]()
    for place, (label, share, told) in enumerate(shares):
        middle = _LEFT + room * (place + 0.5)
        top = _y(share, 1)
        drawn.append(
            f'<rect class="bar" x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{HEIGHT - _BOTTOM - top:.1f}" rx="2"><title>{escape(told)}</title></rect>'
            f'<text class="value" x="{middle:.1f}" y="{top - 5:.1f}">{share:.0%}</text>'
            f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - _BOTTOM + 14}">{escape(label)}</text>'
        )
    ticks = [(value, f"{value:.0%}") for value in (0, 0.25, 0.5, 0.75, 1)]
    return _framed("".join(drawn), ticks, 1, x_title, f"{len(shares)} bars: " + ", ".join(told for *_, told in shares))


def line(values: Sequence[float], *, x_title: str, largest: int) -> str:
    """A line from left to right, with whole numbers up to `largest` at its left."""
    step = (WIDTH - _LEFT - _RIGHT) / max(len(values), 1)
    corners = list[str]()
    for place, value in enumerate(values):
        y = _y(value, max(largest, 1))
        corners += [f"{_LEFT + step * place:.1f},{y:.1f}", f"{_LEFT + step * (place + 1):.1f},{y:.1f}"]
    base = f"{_y(0, 1):.1f}"
    area = f"{_LEFT},{base} {' '.join(corners)} {WIDTH - _RIGHT},{base}"
    drawn = f'<polygon class="area" points="{area}"/><polyline class="line" points="{" ".join(corners)}"/>'
    every = -(-max(largest, 1) // 5)
    ticks = [(value, f"{value}") for value in range(0, max(largest, 1) + 1, every)]
    told = f"from {min(values, default=0):.2f} to {max(values, default=0):.2f}"
    return _framed(drawn if values else "", ticks, max(largest, 1), x_title, told)


def _y(value: float, largest: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / largest


def _framed(drawn: str, ticks: Sequence[tuple[float, str]], largest: float, x_title: str, told: str) -> str:
    grid = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{_y(value, largest):.1f}" '
        f'y2="{_y(value, largest):.1f}"/>'
        f'<text class="tick left" x="{_LEFT - 6}" y="{_y(value, largest) + 4:.1f}">{escape(label)}</text>'
        for value, label in ticks
    )
    title = f'<text class="tick" x="{(WIDTH + _LEFT - _RIGHT) / 2:.0f}" y="{HEIGHT - 4}">{escape(x_title)}</text>'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(told)}">{grid}{drawn}{title}</svg>'
