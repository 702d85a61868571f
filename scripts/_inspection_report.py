"""An inspection in words for the terminal, as numbers for machines, and as one HTML page that needs nothing else."""

import base64
import io
from collections import Counter
from html import escape
from math import log2
from statistics import median

from PIL import Image

from unet_attn.faults import Fault, counted, printable
from unet_attn.inspection import Inspection, as_picture

BAR = 30  # characters of the longest bar
LISTED = 12  # faults of a kind, groups of duplicates: in the terminal and on the page
IN_GROUP = 8  # pictures shown of a group
# ratio of width to height up to which a picture counts as the shape
SHAPES = ((0.4, "narrower than 2:5"), (0.6, "about 1:2"), (0.87, "about 3:4"), (1.15, "about square"))
SHAPES += ((1.67, "about 4:3"), (2.5, "about 2:1"), (float("inf"), "wider than 5:2"))

Bars = list[tuple[str, int]]


# ---- the figures


def side_bars(found: Inspection) -> Bars:
    """Pictures by the length of their shorter side, in powers of two."""
    counts = Counter(int(log2(min(size))) for size in found.images.image_sizes)
    if not counts:
        return []
    return [
        (f"{2**n} to {2 ** (n + 1) - 1} px" if n else "1 px", counts[n]) for n in range(min(counts), max(counts) + 1)
    ]


def shape_bars(found: Inspection) -> Bars:
    counts = Counter(
        next(name for limit, name in SHAPES if width / height < limit) for width, height in found.images.image_sizes
    )
    return [(name, counts[name]) for _, name in SHAPES if counts[name]]


def bucket_bars(found: Inspection) -> Bars:
    images = found.images
    return [("{} x {}".format(*images.sizes[bucket]), count) for bucket, count in images.bucket_counts()]


def length_bars(found: Inspection) -> Bars:
    """Captions by their length in tokens, in about ten steps."""
    lengths = found.captions.lengths
    width = max(1, -(-max(lengths) // 10))
    counts = Counter(length // width for length in lengths)
    name = (lambda n: f"{n}") if width == 1 else (lambda n: f"{n * width} to {n * width + width - 1}")
    return [(f"{name(n)} tokens", counts[n]) for n in range(min(counts), max(counts) + 1)]


def faults_by_kind(found: Inspection) -> dict[str, list[Fault]]:
    kinds: dict[str, list[Fault]] = {}
    for fault in found.faults:
        kinds.setdefault(fault.kind, []).append(fault)
    return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))


def caption_lines(found: Inspection) -> list[str]:
    """What is to be said of the captions, in sentences."""
    captions = found.captions
    if captions is None:
        return ["no captions are needed: a model without text" if not found.problems else "no captions"]
    longest, middle = max(captions.lengths), median(captions.lengths)
    lines = [
        counted(captions.count, "caption") + f", {captions.distinct} of them different" * (captions.count > 1),
        f"tokens: median {middle:g}, longest {longest}, limit {captions.limit}, start and end included",
    ]
    if captions.cut:
        cut = counted(captions.cut, "caption is longer than the limit and gets", "captions are longer than it and get")
        lines.append(f"{cut} cut (tokenizer.max_length)")
    if captions.pictures_without:
        one, several = "picture has no caption: it trains", "pictures have no caption: they train"
        lines.append(f"{counted(captions.pictures_without, one, several)} the empty caption")
    if captions.pictures_with_several:
        several = counted(captions.pictures_with_several, "picture has", "pictures have")
        lines.append(f"{several} several captions: one is drawn per visit")
    return lines


# ---- the terminal


def as_text(found: Inspection) -> str:
    parts: list[str] = []
    if found.images is not None:
        parts += [*found.images.description(), ""]
        parts += _bars_as_text("shorter sides", side_bars(found)) + _bars_as_text("shapes", shape_bars(found))
        if found.images.options.buckets:
            parts += _bars_as_text("buckets, width x height", bucket_bars(found))
        parts += ["captions", *(f"  {line}" for line in caption_lines(found)), ""]
        if found.captions is not None:
            parts += _bars_as_text("caption lengths", length_bars(found))
            words = ", ".join(f"{word} {count}" for word, count in found.captions.words[:20])
            parts += ["most common words", f"  {words}", ""]
        parts += _groups_as_text("the same file several times", found.exact, found)
        if found.near is None:
            parts += ["near duplicates: too many pictures to compare", ""]
        else:
            parts += _groups_as_text("near duplicates", found.near, found)
    for kind, faults in faults_by_kind(found).items():
        parts += [f"{kind}: {len(faults)}", *(f"  {fault}" for fault in faults[:LISTED]), *_more(faults), ""]
    if found.problems:
        parts += ["training would NOT start:", *(f"  {problem}" for problem in found.problems)]
    else:
        parts += ["training would start"]
    return printable("\n".join(parts))


def _bars_as_text(title: str, bars: Bars) -> list[str]:
    most = max((count for _, count in bars), default=1)
    width = max((len(name) for name, _ in bars), default=0)
    return [title, *(f"  {name:>{width}} {'█' * -(-count * BAR // most)} {count}" for name, count in bars), ""]


def _groups_as_text(title: str, groups: list[list[int]], found: Inspection) -> list[str]:
    head = f"{title}: {_count(groups)}"
    lines = [
        "  "
        + "  =  ".join(_short_name(found, index) for index in group[:IN_GROUP])
        + (" ..." * (len(group) > IN_GROUP))
        for group in groups[:LISTED]
    ]
    return [head, *lines, *_more(groups), ""]


def _short_name(found: Inspection, index: int) -> str:
    """A picture's name within its data set."""
    return printable(str(found.images.paths[index].relative_to(found.path)))


def _count(groups: list[list[int]]) -> str:
    return f"{counted(len(groups), 'group')} of {sum(map(len, groups))} pictures" if groups else "none"


def _more(items: list) -> list[str]:
    return [f"  and {len(items) - LISTED} more: --json lists all"] if len(items) > LISTED else []


# ---- machines


def as_json(found: Inspection) -> dict[str, object]:
    """Everything but the pictures, as plain values."""
    report: dict[str, object] = {
        "path": found.path,
        "would_start": not found.problems,
        "problems": found.problems,
        "faults": [{"kind": f.kind, "path": str(f.path), "reason": f.reason} for f in found.faults],
    }
    if (images := found.images) is not None:
        captions = found.captions
        report |= {
            "pictures": len(images),
            "captions_from": images.kind,
            "in_memory": images.in_memory,
            "notes": images.notes,
            "shorter_sides": dict(side_bars(found)),
            "shapes": dict(shape_bars(found)),
            "buckets": dict(bucket_bars(found)),
            "same_files": [[images.name(index) for index in group] for group in found.exact],
            "near_duplicates": found.near and [[images.name(index) for index in group] for group in found.near],
            "captions": None
            if captions is None
            else {
                "count": captions.count,
                "distinct": captions.distinct,
                "pictures_without": captions.pictures_without,
                "pictures_with_several": captions.pictures_with_several,
                "token_limit": captions.limit,
                "longest": max(captions.lengths),
                "cut": captions.cut,
                "words": dict(captions.words),
            },
            "sheet": [caption for _, caption in found.sheet],
        }
    return report


# ---- the page

STYLE = """
:root { color-scheme: light dark; --soft: #8883; --bar: #4a7fb5; --good: #2b7a3d; --bad: #b3362b }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.verdict { color: #fff; padding: .6rem 1rem; border-radius: .4rem; white-space: pre-wrap; overflow-wrap: anywhere }
.good { background: var(--good) } .bad { background: var(--bad) }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 0 3rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
td { padding: .1rem .5rem .1rem 0; white-space: nowrap } td.bar { width: 100% }
td.bar div { background: var(--bar); height: .8rem; border-radius: 2px } td.count { text-align: right }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(7rem, 1fr)); gap: 1rem .8rem }
.groups { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: start }
.group { display: flex; gap: .4rem; padding: .5rem; border: 1px solid var(--soft); border-radius: .4rem }
figure { margin: 0 } figcaption { font-size: .8rem; line-height: 1.25; overflow-wrap: anywhere }
img { width: 100%; aspect-ratio: 1; object-fit: contain; image-rendering: pixelated; background: var(--soft) }
.group { flex-wrap: wrap } .group figure { width: 5rem }
.none { opacity: .6; font-style: italic } .words { display: flex; flex-wrap: wrap; gap: .2rem 1rem }
ul { padding-left: 1.2rem; overflow-wrap: anywhere } .soft { opacity: .7 }
"""


def as_html(found: Inspection) -> str:
    title = escape(printable(found.path))
    verdict = (
        "Training would start." if not found.problems else "Training would not start:\n" + "\n".join(found.problems)
    )
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="verdict {"bad" if found.problems else "good"}">{escape(printable(verdict))}</p>',
    ]
    if found.images is not None:
        parts += ["<ul>", *(f"<li>{escape(line)}</li>" for line in found.images.description()), "</ul>"]
        parts += _sheet_as_html(found)
        bars = [("Shorter sides", side_bars(found)), ("Shapes, width to height", shape_bars(found))]
        if found.images.options.buckets:
            bars.append(("Buckets, width x height", bucket_bars(found)))
        if found.captions is not None:
            bars.append(("Caption lengths", length_bars(found)))
        parts += [
            '<div class="columns">',
            *(_bars_as_html(*each) for each in bars),
            "</div>",
            *_captions_as_html(found),
        ]
    parts += [_faults_as_html(kind, faults) for kind, faults in faults_by_kind(found).items()]
    if found.images is not None:
        parts += _groups_as_html("The same file several times", found.exact, found)
        if found.near is None:
            parts.append("<h2>Near duplicates</h2><p>There are too many pictures to compare each with each.</p>")
        else:
            parts += _groups_as_html("Near duplicates", found.near, found)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(parts)
    return f"<!DOCTYPE html>\n<html lang=en><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"


def _picture_as_html(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def _sheet_as_html(found: Inspection) -> list[str]:
    cells = [
        f"<figure>{_picture_as_html(picture)}<figcaption"
        + (f">{escape(caption)}" if caption else ' class="none">empty caption')
        + "</figcaption></figure>"
        for picture, caption in found.sheet
    ]
    explained = (
        "The first pictures and captions of a training with these options: the very tensors, cropped and flipped, and "
        "the captions as the tokenizer leaves them. Some are empty on purpose (data.caption_dropout)."
    )
    return [
        "<h2>What the model will see</h2>",
        f'<p class="soft">{explained}</p>',
        '<div class="sheet">',
        *cells,
        "</div>",
    ]


def _bars_as_html(title: str, bars: Bars) -> str:
    most = max((count for _, count in bars), default=1)
    rows = (
        f'<tr><td>{escape(name)}</td><td class="bar"><div style="width:{100 * count / most:.1f}%"></div></td>'
        f'<td class="count">{count}</td></tr>'
        for name, count in bars
    )
    return f"<section><h2>{escape(title)}</h2><table>{''.join(rows)}</table></section>"


def _captions_as_html(found: Inspection) -> list[str]:
    parts = ["<h2>Captions</h2><ul>", *(f"<li>{escape(line)}</li>" for line in caption_lines(found)), "</ul>"]
    if found.captions is not None:
        words = (f"<span>{escape(word)} {count}</span> " for word, count in found.captions.words)
        parts += ["<h2>Most common words</h2>", f'<p class="words">{"".join(words)}</p>']
    return parts


def _faults_as_html(kind: str, faults: list[Fault]) -> str:
    lines = [f"<li>{escape(str(fault))}</li>" for fault in faults[:LISTED]]
    lines += [f"<li>{line}</li>" for line in _more(faults)]
    return f"<h2>Fault: {escape(kind)}, {len(faults)}</h2><ul>{''.join(lines)}</ul>"


def _groups_as_html(title: str, groups: list[list[int]], found: Inspection) -> list[str]:
    parts = [f"<h2>{title}: {_count(groups)}</h2>", '<div class="groups">']
    for group in groups[:LISTED]:
        figures = (
            f"<figure>{_picture_as_html(as_picture(found.images[index]['image']))}"
            f"<figcaption>{escape(_short_name(found, index))}</figcaption></figure>"
            for index in group[:IN_GROUP]
        )
        parts.append(f'<div class="group">{"".join(figures)}</div>')
    return [*parts, "</div>", *(f"<p>{line}</p>" for line in _more(groups))]
