"""A line chart as an SVG: text that any browser shows, without a plotting library."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 110, 40, 48  # margins that hold title, numbers and names
COLOURS = ("#1f5fa8", "#c8442c", "#5f6b76", "#3c8c4f")


def line_chart(
    lines: Mapping[str, Sequence[float]], places: Sequence[float], *, title: str, across: str, up: str
) -> str:
    """An SVG of named lines over common places, from 0 up. Raises ValueError for a line of another length."""
    for name, values in lines.items():
        if len(values) != len(places):
            raise ValueError(f"line {name!r} has {len(values)} values for {len(places)} places")
    top = max((value for values in lines.values() for value in values), default=0.0) or 1.0
    first, last = min(places), max(places)

    def x(place: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (place - first) / ((last - first) or 1.0)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 20, title, size=14),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across, anchor="middle"),
        _text(8, TOP - 8, up),
    ]
    for step in range(5):
        value = top * step / 4
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 6, y(value) + 4, f"{value:.3g}", anchor="end"))
    parts += [_text(x(place), HEIGHT - BOTTOM + 18, f"{place:g}", anchor="middle") for place in places]
    for number, (name, values) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in zip(places, values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(x(last) + 8, y(values[-1]) + 4, name, colour=colour))
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#222222") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {where}>{escape(text)}</text>"
