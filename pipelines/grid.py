"""Many pictures as one, each with its prompt beneath it: for a glance at a run, and at what its words drew."""

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

SHORTEST_SIDE = 96  # smaller pictures are enlarged to about this, so that a prompt fits beneath them
FONT_SIZE = 12
CAPTION_LINES = 2
GAP = 6  # pixels
HEAT = (225, 40, 20)  # the colour of a pixel that heeds no other word


def picture_grid(images: list[Image.Image], captions: list[str], columns: int) -> Image.Image:
    """Lay pictures out in rows, on white, each with its caption beneath.

    images: any modes and sizes; captions: one each, cut to two lines; columns: pictures in a row. Returns RGB.
    Raises ValueError if there is no picture, or not one caption each, or no column.
    """
    if not images or len(images) != len(captions) or columns < 1:
        raise ValueError(
            f"a grid of {columns} columns cannot hold {len(images)} pictures with {len(captions)} captions"
        )
    columns = min(columns, len(images))
    width, height = (max(image.size[axis] for image in images) for axis in (0, 1))
    # a whole factor, so that every pixel stays a square
    factor = max(1, -(-SHORTEST_SIDE // max(width, height)))
    width, height = width * factor, height * factor
    font = ImageFont.load_default(size=FONT_SIZE)
    line_height = FONT_SIZE + 3
    cell_width, cell_height = width + GAP, height + CAPTION_LINES * line_height + GAP
    rows = -(-len(images) // columns)
    grid = Image.new("RGB", (columns * cell_width + GAP, rows * cell_height + GAP), "white")
    draw = ImageDraw.Draw(grid)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left = GAP + index % columns * cell_width
        top = GAP + index // columns * cell_height
        enlarged = image.convert("RGB").resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
        grid.paste(enlarged, (left, top))
        for number, line in enumerate(_lines(caption, font, width)):
            draw.text((left, top + height + 2 + number * line_height), line, fill="black", font=font)
    return grid


def attention_sheet(
    image: Image.Image, words: tuple[str, ...], maps: torch.Tensor, caption: str, columns: int
) -> Image.Image:
    """A picture beside its grey copies, one for each word, red where the word was attended to.

    words: W; maps: (W, H, W) in [0, 1], of the picture's size. The strongest of all maps is the full red. Returns RGB.
    """
    grey = np.asarray(image.convert("L").convert("RGB"), dtype=np.float32)
    heat = (maps / maps.max()).numpy()[..., None] if len(words) else []
    overlays = [Image.fromarray((grey + (np.array(HEAT) - grey) * each).round().astype(np.uint8)) for each in heat]
    return picture_grid([image, *overlays], [caption, *words], columns)


def _lines(caption: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """The caption broken at spaces into at most CAPTION_LINES lines of at most width pixels, cut with an ellipsis."""
    lines: list[str] = []
    for word in caption.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] = f"{lines[-1]} {word}"
        else:
            lines.append(word)
        if len(lines) > CAPTION_LINES:  # what follows is cut off, however long it is
            break
    if len(lines) > CAPTION_LINES:
        lines = [*lines[: CAPTION_LINES - 1], " ".join(lines[CAPTION_LINES - 1 :])]
    return [_shortened(line, font, width) for line in lines]


def _shortened(line: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    if font.getlength(line) <= width:
        return line
    line = line[: 4 * width]  # no letter of a thousand pages is worth measuring
    while line and font.getlength(f"{line}…") > width:
        line = line[:-1]
    return f"{line}…"
