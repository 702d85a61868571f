"""The parts that a report is made of, as HTML that needs nothing else: no file, no script, no network."""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from unet_attn.faults import one_line, printable

LARGEST_PICTURE = 240_000  # bytes; eight of them as text are under half of what a page may weigh
LONGEST_SIDE = 1200  # pixels of a picture that has to be made smaller

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d2126; --soft: #5d6772; --rule: #e2e5e9; --card: #f6f7f9;
  --accent: #1f5fa8 }
@media (prefers-color-scheme: dark) {
  :root { --page: #16191d; --ink: #e4e7eb; --soft: #99a4b0; --rule: #2d333a; --card: #1e2328; --accent: #78b0ec } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif }
main { max-width: 74rem; margin: 0 auto; padding: 2.5rem 1.25rem 5rem }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .5rem; overflow-wrap: anywhere }
h2 { font-size: 1.25rem; margin: 3.5rem 0 .75rem; padding-top: 1rem; border-top: 1px solid var(--rule) }
p { margin: 0 0 1rem; max-width: 46rem; overflow-wrap: anywhere }
.lede { font-size: 1.15rem; color: var(--soft) }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; margin-top: 1.5rem; font-size: .9rem }
a { color: var(--accent); text-decoration: none } a:hover { text-decoration: underline }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.5rem 0 }
.tile { flex: 1 1 9.5rem; max-width: 20rem; background: var(--card); border-radius: .6rem; padding: .8rem 1rem }
.tile b { display: block; font-size: 1.35rem; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums }
.tile span { font-size: .85rem; color: var(--soft) }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); gap: 1.5rem 2rem }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); gap: 1.5rem }
.pictures figure:only-child { grid-column: 1 / -1 }
.charts + p, .scroll + p, .pictures + .scroll { margin-top: 1rem }
figure { margin: 0; min-width: 0; max-width: 100% }
figure .chart { width: 100%; height: auto; display: block; max-width: 46rem } figure .paper { fill: none }
figcaption { font-size: .875rem; color: var(--soft); max-width: 46rem; overflow-wrap: anywhere }
img { display: block; max-width: 100%; height: auto; border-radius: .4rem; border: 1px solid var(--rule) }
.pictures figcaption { margin-top: .35rem }
.scroll { overflow-x: auto; max-width: 100% }
table { border-collapse: collapse; font-size: .95rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .4rem 1.5rem .4rem 0; border-bottom: 1px solid var(--rule) }
th { font-weight: 600; font-size: .85rem; color: var(--soft) } td { overflow-wrap: anywhere; min-width: 6rem }
td.figure { white-space: nowrap }
pre { background: var(--card); border-radius: .6rem; padding: .9rem 1.1rem; overflow-x: auto; font-size: .85rem;
  line-height: 1.5; margin: 0 0 1rem }
pre, code { font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace }
.missing { border-left: 3px solid var(--rule); padding-left: 1rem; color: var(--soft); max-width: 46rem }
.missing pre { margin-top: .5rem; color: var(--ink) }
details summary { cursor: pointer; color: var(--accent); margin-bottom: .75rem }
@media print { nav { display: none } h2 { break-after: avoid } figure, tr { break-inside: avoid } }
"""


class Section(NamedTuple):
    """A part of the page: its title, the name by which the page links to it, and its HTML."""

    title: str
    anchor: str
    body: str


def page(title: str, head: str, sections: Sequence[Section]) -> str:
    """The whole document. title: plain text; head: the HTML before the sections."""
    links = "\n".join(f'<a href="#{each.anchor}">{escape(each.title)}</a>' for each in sections)
    bodies = "\n".join(f'<h2 id="{each.anchor}">{escape(each.title)}</h2>\n{each.body}' for each in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{text(title)}</h1>\n{head}\n<nav>\n{links}\n</nav>\n{bodies}\n</main>\n</body>\n</html>\n"
    )


def text(value: object) -> str:
    """Any text as HTML, on one line. What a page cannot hold, odd bytes and control characters, comes as escapes."""
    return escape(one_line(printable(str(value))))


def paragraph(value: str, *, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{text(value)}</p>"


def missing(why: str, command: str) -> str:
    """What was not measured, and the command that would."""
    return f'<div class="missing">{text(why)}{verbatim(command)}</div>'


def verbatim(value: str) -> str:
    return f"<pre>{escape(printable(value))}</pre>"


def folded(summary: str, body: str) -> str:
    return f"<details><summary>{text(summary)}</summary>{body}</details>"


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Large figures. values: the figure and its name."""
    cells = (f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for value, name in values)
    return f'<div class="tiles">{"".join(cells)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of plain text; the second column holds figures, which are not broken."""
    names = "".join(f"<th>{text(name)}</th>" for name in head)
    lines = (
        "<tr>" + "".join(f"<td{' class=figure' * (n == 1)}>{text(cell)}</td>" for n, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{names}</tr>{"".join(lines)}</table></div>'


def charts(figures: Iterable[tuple[str, str]]) -> str:
    """Charts side by side. figures: an SVG and what is to be seen in it."""
    parts = (f"<figure>{svg}<figcaption>{text(told)}</figcaption></figure>" for svg, told in figures)
    return f'<div class="charts">{"".join(parts)}</div>'


def pictures(figures: Iterable[tuple[Path, str]]) -> str:
    """Pictures side by side. figures: a file and its caption; one that cannot be read is told in its place."""
    parts = []
    for path, caption in figures:
        try:
            shown = f'<img alt="{text(caption)}" src="{data_uri(path)}">'
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # all that Pillow raises for bad files
            shown = paragraph(f"{path.name} cannot be read as a picture.")
        parts.append(f"<figure>{shown}<figcaption>{text(caption)}</figcaption></figure>")
    return f'<div class="pictures">{"".join(parts)}</div>'


def data_uri(path: Path) -> str:
    """A picture's file as text; one of more than LARGEST_PICTURE bytes is made smaller and becomes a JPEG.

    Raises OSError or another of Pillow's exceptions for what is no picture.
    """
    data = path.read_bytes()
    with Image.open(io.BytesIO(data), formats=("PNG",)) as picture:
        picture.load()
        if len(data) <= LARGEST_PICTURE:
            return f"data:image/png;base64,{base64.b64encode(data).decode()}"
        side, picture = LONGEST_SIDE, _on_white(picture)
    while True:
        smaller = picture.copy()
        smaller.thumbnail((side, side))
        buffer = io.BytesIO()
        smaller.save(buffer, "JPEG", quality=85)
        if buffer.tell() <= LARGEST_PICTURE:
            return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        side = side * 3 // 4


def _on_white(picture: Image.Image) -> Image.Image:
    """As RGB, since a JPEG has no transparency."""
    layer = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
