"""Charts as SVG: where lines, bands and bars lie, and what a long curve keeps."""

from xml.etree import ElementTree

import numpy as np
import pytest

from unet_attn import charts
from unet_attn.charts import Line, Scale, chart, curve, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def points(element: ElementTree.Element) -> list[tuple[float, ...]]:
    return [tuple(map(float, point.split(","))) for point in element.get("points").split()]


def test_a_chart_draws_each_line_through_its_values_and_escapes_names() -> None:
    svg = line_chart({"a<b": [0.0, 2.0], "c": [1.0, 1.0]}, [0.1, 0.9], title="t", across="x", up="y")

    root = ElementTree.fromstring(svg)
    lines = [points(line) for line in root.iter(f"{SVG}polyline")]
    bottom, right = charts.HEIGHT - charts.BOTTOM, charts.WIDTH - charts.RIGHT
    assert lines[0] == [(charts.LEFT, bottom), (right, charts.TOP)]
    assert lines[1][0][1] == lines[1][1][1] == (bottom + charts.TOP) / 2
    assert "a<b" in [text.text for text in root.iter(f"{SVG}text")]
    with pytest.raises(ValueError, match="line 'c' has 1 values for 2 places"):
        line_chart({"c": [1.0]}, [0.1, 0.9], title="t", across="x", up="y")
    with pytest.raises(ValueError, match="the chart 't' has nothing to show"):
        line_chart({"c": []}, [], title="t", across="x", up="y")


def test_the_axis_holds_bands_and_error_bars_and_goes_below_zero_for_them() -> None:
    band = Line([0.0, 1.0], [1.0, 1.0], band=([0.5, 0.5], [3.0, 2.0]))
    bars = Line([0.0, 1.0], [0.0, 1.0], errors=[1.0, 0.5])

    root = ElementTree.fromstring(chart({"band": band, "bars": bars}, title="t", across="x", up="y"))

    # from -1 to 3: 60 pixels or so a unit
    unit = (charts.HEIGHT - charts.TOP - charts.BOTTOM) / 4
    shade = points(next(root.iter(f"{SVG}polygon")))
    assert shade[3][1] == charts.TOP and shade[0][1] == pytest.approx(charts.TOP + 2.5 * unit)
    stroke = next(path for path in root.iter(f"{SVG}path") if path.get("stroke") == "currentColor")
    assert stroke.get("d") == f"M{charts.LEFT:.1f} {charts.TOP + 4 * unit:.1f}V{charts.TOP + 2 * unit:.1f}"
    assert "1: 1 ± 0.5" in [title.text for title in root.iter(f"{SVG}title")]


def test_a_logarithmic_axis_gives_each_factor_the_same_height_and_is_refused_to_zero() -> None:
    line = Line([0.0, 1.0, 2.0], [0.01, 0.1, 1.0])

    root = ElementTree.fromstring(chart({"": line}, title="t", across="x", up="y", log=True))
    heights = [height for _, height in points(next(root.iter(f"{SVG}polyline")))]
    with_zero = ElementTree.fromstring(
        chart({"": Line([0.0, 1.0], [0.0, 1.0])}, title="t", across="x", up="y", log=True)
    )

    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.1)
    assert points(next(with_zero.iter(f"{SVG}polyline")))[0][1] == charts.HEIGHT - charts.BOTTOM


@pytest.mark.parametrize(
    ("low", "high", "log", "ticks"),
    [
        (1, 1664, False, [500, 1000, 1500]),
        (0, 0.7, False, [0, 0.2, 0.4, 0.6]),
        (0.12, 1.9, True, [0.2, 0.5, 1]),
        (0.003, 20, True, [0.01, 0.1, 1, 10]),
        (0.12, 0.16, True, [0.12, 0.13, 0.14, 0.15, 0.16]),  # less than a factor: no decade lies in it
        (7, 7, False, [7]),
    ],
)
def test_an_axis_is_marked_at_round_numbers(low: float, high: float, log: bool, ticks: list[float]) -> None:
    assert Scale(low, high, 0, 1, log=log).ticks() == pytest.approx(ticks)


@pytest.mark.parametrize("end", [0.0, 0.5, 1.0])
def test_names_of_lines_that_end_together_do_not_lie_on_each_other(end: float) -> None:
    lines = {f"line {n}": Line([0.0, 1.0], [1.0, end + 0.001 * n]) for n in range(3)}

    root = ElementTree.fromstring(chart(lines, title="t", across="x", up="y"))

    heights = sorted(float(text.get("y")) for text in root.iter(f"{SVG}text") if text.get("fill") == "currentColor")
    assert np.diff(heights).min() >= charts.LINE_HEIGHT
    # half a line's height below the line that it names
    assert charts.TOP + 4 <= heights[0] and heights[-1] <= charts.HEIGHT - charts.BOTTOM + 4


def test_a_line_without_values_keeps_the_colours_of_the_others() -> None:
    svg = chart({"gone": Line([], []), "here": Line([1.0], [2.0])}, title="t", across="x", up="y")

    assert '<g class="line1">' in svg and '<g class="line0">' not in svg


def test_a_long_curve_becomes_few_points_and_keeps_its_shape_and_its_spread() -> None:
    steps = np.arange(1, 10_008)
    rng = np.random.default_rng(0)
    values = 1 / np.sqrt(steps) + 0.01 * rng.standard_normal(len(steps))
    values[4999] = np.nan
    values[5003] = 100.0  # a spike, which must not lift the line

    line = curve(steps, values)

    assert len(line.places) == len(line.values) == charts.BUCKETS
    expected = 1 / np.sqrt(np.array(line.places))
    assert np.abs(np.array(line.values) - expected)[20:].max() < 0.003
    low, high = map(np.array, line.band)
    inside = (low < expected) & (expected < high)
    assert inside[5:].all() and np.isfinite(high).all()
    assert (high - low)[100:].mean() == pytest.approx(2 * 1.64 * 0.01, rel=0.15)


def test_a_short_curve_keeps_every_point() -> None:
    line = curve([1.0, 2.0, 3.0], [5.0, 7.0, 3.0])

    assert (line.places, line.values) == ([1.0, 2.0, 3.0], [5.0, 7.0, 3.0])
    assert curve([], []).values == [] and curve([1.0], [float("nan")]).values == []
