"""What evaluate.py shows: the table, the plot of the loss, and the sampled pictures beside the nearest trained ones."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they take seconds to import, which a wrong command line need not wait for
    from PIL import Image
    from torch import Tensor

    from unet_attn.conditioning import ConditioningGap

COLUMNS = 8
LARGEST = 256  # pixels of a picture in the sheet


def table(figures: dict[str, Any]) -> str:
    """The figures with their standard errors, a line each, and how they were measured."""
    from unet_attn.scores import how_measured

    loss, copies = figures["loss"], figures["copies"]
    lines = [
        ("sampled against real", f"{figures['sampled_pictures']} against {figures['real_pictures']} pictures"),
        ("KID x 1000", f"{1000 * figures['kid']:.2f} +- {1000 * figures['kid_error']:.2f}"),
        ("Frechet distance", f"{figures['frechet']:.2f} +- {figures['frechet_error']:.2f}"),
        ("precision", f"{figures['precision']:.3f} +- {figures['precision_error']:.3f}"),
        ("recall", f"{figures['recall']:.3f} +- {figures['recall_error']:.3f}"),
        (loss_name(loss), plus_minus(loss.get("true", loss["empty"]), digits=4)),
    ]
    if "gap_exchanged" in loss:
        lines.append(("gap, exchanged captions", plus_minus(loss["gap_exchanged"], digits=4)))
    elif "gap_empty" in loss:
        lines.append(("gap, exchanged captions", "not measured: all captions are the same"))
    if "gap_empty" in loss:
        lines.append(("gap, empty captions", plus_minus(loss["gap_empty"], digits=4)))
    if "rate" in copies:
        among, excess = plus_minus(copies["rate_among_training"]), plus_minus(copies["excess"])
        lines.append(("near copies", f"{plus_minus(copies['rate'])} (training pictures of one another {among})"))
        lines.append(("near copies, excess", excess))
    else:
        lines.append(("near copies", f"not counted: {copies['skipped']}"))
    if "agreement" in figures:
        agreement = figures["agreement"]
        held_out = "" if agreement["held_out"] is None else f", pictures new to the judge {agreement['held_out']:.3f}"
        beside = f"their real pictures {plus_minus(agreement['real'])}{held_out}, chance {agreement['chance']:.3f}"
        lines.append(("caption agreement", f"{plus_minus(agreement['rate'])} ({beside})"))
    if figures["skipped"]:
        lines.append(("files skipped", f"{figures['skipped']}, {figures['pictures']} pictures read"))
    if figures["without_caption"]:
        lines.append(("without a caption", f"{figures['without_caption']} pictures, left out"))
    if figures["colour_as_grey"]:
        lines.append(("compared in grey", "the pictures are in colour, the run draws grey ones"))
    lines.append(("measured", how_measured(figures)))
    return "\n".join(f"{name:24} {value}" for name, value in lines)


def loss_name(loss: dict[str, Any]) -> str:
    """What the loss is one of, as far as that is known."""
    if loss["on_training_data"] is not None:
        return "loss on training data" if loss["on_training_data"] else "validation loss"
    return "loss" if loss["trained_on"] is None else f"loss, {loss['trained_on']} of {loss['pictures']} trained on"


def plus_minus(figure: dict[str, float], *, digits: int = 3) -> str:
    return f"{figure['value']:.{digits}f} +- {figure['error']:.{digits}f}"


def loss_chart(gap: "ConditioningGap") -> str:
    """An SVG of the loss at each time, a line per kind of caption."""
    from unet_attn.charts import line_chart

    title = f"Loss by noise level, {gap.pictures} pictures"
    return line_chart(gap.by_time, gap.times, title=title, across="time (0 = clean, 1 = noise)", up="mean square error")


def nearest_sheet(
    sampled: "Sequence[Tensor]", trained: "Sequence[Tensor]", nearest: Sequence[dict[str, Any]]
) -> "Image.Image":
    """Each sampled picture above the training picture nearest to it, with its caption and how alike they are.

    sampled, trained: (C, H, W) in [-1, 1], in the order of `nearest`, the entries of evaluation.json. Returns RGB.
    """
    from PIL import Image

    from unet_attn.pipelines.grid import picture_grid

    above = [_image(picture) for picture in sampled]
    below = [_image(picture) for picture in trained]
    said = [each["caption"] or f"seed {each['seed']}" for each in nearest]
    alike = [f"{each['correlation']:.3f} {each['training_picture'].rpartition('/')[2]}" for each in nearest]
    images: list[Image.Image] = []
    captions: list[str] = []
    for first in range(0, len(above), COLUMNS):
        row = slice(first, first + COLUMNS)
        # a last row that is not full is filled up, so that each picture stays above its own
        gap = COLUMNS - len(above[row]) if first else 0
        blank = [Image.new("L", above[0].size, 255)] * gap
        images += [*above[row], *blank, *below[row], *blank]
        captions += [*said[row], *[""] * gap, *alike[row], *[""] * gap]
    return picture_grid(images, captions, columns=min(COLUMNS, len(above)))


def _image(picture: "Tensor") -> "Image.Image":
    from einops import rearrange
    from PIL import Image

    from unet_attn.extractors import to_bytes

    pixels = to_bytes(picture)
    image = Image.fromarray((pixels[0] if len(pixels) == 1 else rearrange(pixels, "c h w -> h w c")).numpy())
    image.thumbnail((LARGEST, LARGEST))
    return image
