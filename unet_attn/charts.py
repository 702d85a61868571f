"""Line charts as SVG: text that any browser shows, in its light or dark scheme, without a plotting library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

import numpy as np

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 110, 40, 48  # margins that hold title, numbers and names
EDGE = 16  # margin on the right where no line has a name
LINE_HEIGHT = 14  # between the names of lines that end at the same height
BUCKETS = 400  # points of a long curve, more than a screen tells apart
SMOOTHING = 50  # a curve is averaged over a window of 2/50 of its length
BAND = (0.05, 0.95)  # the quantiles of the raw values between which the band lies

STYLE = (
    ".chart{font:12px system-ui,sans-serif}.paper{fill:#fff}.ink{fill:#222}.rule{stroke:#ddd}"
    ".line0{color:#1f5fa8}.line1{color:#c8442c}.line2{color:#5f6b76}.line3{color:#3c8c4f}"
    "@media(prefers-color-scheme:dark){.paper{fill:#16191d}.ink{fill:#d5d9de}.rule{stroke:#343a41}"
    ".line0{color:#78b0ec}.line1{color:#f08a72}.line2{color:#9aa5b1}.line3{color:#7cc98f}}"
)
COLOURS = 4


@dataclass(frozen=True)
class Line:
    """Values over places, N of each.

    band: a low and a high value at each place, which a shade joins; errors: half the length of a bar at each place.
    """

    places: Sequence[float]
    values: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None
    errors: Sequence[float] | None = None

    def spread(self) -> tuple[Sequence[float], Sequence[float]]:
        """The lowest and the highest that is drawn at each place."""
        if self.band is not None:
            return self.band
        errors = self.errors or [0.0] * len(self.values)
        pairs = list(zip(self.values, errors, strict=True))
        return [value - error for value, error in pairs], [value + error for value, error in pairs]


class Scale:
    """Numbers of an axis as places on the paper: `low` lies at `start`, `high` at `end`. log: by their logarithms."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = log10(low), log10(high), log10(max(value, low))
        return self.start + (self.end - self.start) * (value - low) / ((high - low) or 1.0)

    def ticks(self) -> list[float]:
        """A few round numbers of the axis."""
        if self.log:
            decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            for digits in ((1,), (1, 2, 5)):
                found = [d * 10.0**power for power in decades for d in digits]
                found = [value for value in found if self.low <= value <= self.high]
                if len(found) > 3 or (digits != (1,) and len(found) > 1):
                    return found
        step = _round_step((self.high - self.low) / 5)
        first = ceil(self.low / step - 1e-9)
        return [step * n for n in range(first, floor(self.high / step + 1e-9) + 1)]


def curve(places: Sequence[float], values: Sequence[float]) -> Line:
    """A noisy series of any length as a smooth line with the band of its raw values, in at most BUCKETS points.

    What is not finite is left out. The line is a moving mean of medians, which single spikes do not lift; its window
    shrinks towards the start, where a loss falls so fast that one of full length would lag behind.
    """
    x, y = np.asarray(places, dtype=np.float64), np.asarray(values, dtype=np.float64)
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if not len(y):
        return Line([], [])
    parts = np.array_split(y, min(BUCKETS, len(y)))
    middle = np.array([np.median(part) for part in parts])
    low, high = (np.array([np.quantile(part, q) for part in parts]) for q in BAND)
    centres = [float(part.mean()) for part in np.array_split(x, len(parts))]
    return Line(centres, _smooth(middle), band=(low.tolist(), high.tolist()))


def line_chart(
    lines: Mapping[str, Sequence[float]], places: Sequence[float], *, title: str, across: str, up: str
) -> str:
    """An SVG of named lines over common places, from 0 up. Raises ValueError for a line of another length."""
    return chart({name: Line(places, values) for name, values in lines.items()}, title=title, across=across, up=up)


def chart(lines: Mapping[str, Line], *, title: str, across: str, up: str, log: bool = False) -> str:
    """An SVG of named lines, the axis from 0 up, or logarithmic for values that are all positive. A name may be empty.

    Raises ValueError for a line that has not one value for each place, and for a chart without any.
    """
    for name, line in lines.items():
        if len(line.values) != len(line.places):
            raise ValueError(f"line {name!r} has {len(line.values)} values for {len(line.places)} places")
    # a line without values keeps its colour, so that the others have the same in every chart
    colours = {name: number % COLOURS for number, name in enumerate(lines)}
    lines = {name: line for name, line in lines.items() if len(line.values)}
    if not lines:
        raise ValueError(f"the chart {title!r} has nothing to show")
    places = [place for line in lines.values() for place in line.places]
    right = WIDTH - (RIGHT if any(lines) else EDGE)
    x = Scale(min(places), max(places), LEFT, right)
    y = _upward(lines, log=log)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        _text(LEFT, 20, title, size=14),
        _text((LEFT + right) / 2, HEIGHT - 10, across, anchor="middle"),
        _text(8, TOP - 8, up),
    ]
    parts.append(f'<path class="rule" d="M{LEFT} {HEIGHT - BOTTOM}H{right}"/>')
    for value in y.ticks():
        parts.append(f'<path class="rule" d="M{LEFT} {y(value):.1f}H{right}"/>')
        parts.append(_text(LEFT - 6, y(value) + 4, _number(value), anchor="end"))
    parts += [_text(x(value), HEIGHT - BOTTOM + 18, _number(value), anchor="middle") for value in x.ticks()]
    ends = _apart([y(line.values[-1]) for line in lines.values()])
    for (name, line), end in zip(lines.items(), ends, strict=True):
        label = _text(right + 8, end + 4, name, ink=False)
        parts.append(f'<g class="line{colours[name]}">{_drawn(line, x, y)}{label}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _upward(lines: Mapping[str, Line], *, log: bool) -> Scale:
    """The axis that holds all that is drawn: linear and with 0, unless `log` is wanted and all is positive."""
    spreads = [line.spread() for line in lines.values()]
    low = min(value for lows, _ in spreads for value in lows)
    high = max(value for _, highs in spreads for value in highs)
    log = log and low > 0 and high > low
    if not log:
        low, high = min(low, 0.0), max(high, 0.0)
        high = high if high > low else low + 1.0
    return Scale(low, high, HEIGHT - BOTTOM, TOP, log=log)


def _drawn(line: Line, x: Scale, y: Scale) -> str:
    """Band, line and error bars, each in the current colour."""
    points = [f"{x(place):.1f},{y(value):.1f}" for place, value in zip(line.places, line.values, strict=True)]
    parts = []
    if line.band is not None:
        low, high = ([f"{x(place):.1f},{y(v):.1f}" for place, v in zip(line.places, b, strict=True)] for b in line.band)
        parts.append(f'<polygon points="{" ".join([*low, *reversed(high)])}" fill="currentColor" opacity="0.18"/>')
    parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="currentColor" stroke-width="2"/>')
    if line.errors is not None:
        for place, value, error in zip(line.places, line.values, line.errors, strict=True):
            bar = f"M{x(place):.1f} {y(value - error):.1f}V{y(value + error):.1f}"
            told = f"<title>{_number(place)}: {value:.4g} ± {error:.2g}</title>"
            parts.append(f'<path d="{bar}" stroke="currentColor"/>')
            parts.append(f'<circle cx="{x(place):.1f}" cy="{y(value):.1f}" r="3" fill="currentColor">{told}</circle>')
    elif len(points) == 1:
        parts.append(f'<circle cx="{x(line.places[0]):.1f}" cy="{y(line.values[0]):.1f}" r="3" fill="currentColor"/>')
    return "".join(parts)


def _smooth(values: np.ndarray) -> list[float]:
    """Means over windows that are centred, and so shorter towards the start; at the end they look back alone."""
    count = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(count)
    before = np.minimum(count // SMOOTHING, at)
    after = np.minimum(before, count - 1 - at)
    return ((sums[at + after + 1] - sums[at - before]) / (before + after + 1)).tolist()


def _apart(heights: Sequence[float]) -> list[float]:
    """The heights, moved so that no two are closer than a line of text, and none below the chart."""
    moved = list(heights)
    order = sorted(range(len(moved)), key=lambda n: moved[n])
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + LINE_HEIGHT)
    limit = float(HEIGHT - BOTTOM)
    for each in reversed(order):
        moved[each] = min(moved[each], limit)
        limit = moved[each] - LINE_HEIGHT
    return moved


def _round_step(step: float) -> float:
    """The next of 1, 2, 2.5, 5, 10 times a power of ten."""
    if step <= 0:
        return 1.0
    power = 10.0 ** floor(log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{round(value, 12):,.10g}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, ink: bool = True) -> str:
    colour = 'class="ink"' if ink else 'fill="currentColor"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" {colour}>{escape(text)}</text>'
