"""Make the figures of docs/attention.md, each from weights that were trained here, in a minute.

    python scripts/figures.py data/emoji [--out docs/figures]

masks.png        who may attend to whom: padding, causal, both
patches.png      four heads of 12 numbers looking at the patches of a picture (48 = 4 x 12)
translation.png  which German word each English word looks at

Another figure, of docs/evaluation.md, shows where the heads of a trained judge look in a picture. It alone is made by

    python scripts/figures.py --judge runs/judge PICTURE docs/images/judge.png
"""

import argparse
import sys
from math import isqrt
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from unet_attn.transformer import EncoderLayer, Transformer, causal_mask

INK, PAPER, ACCENT = (20, 24, 40), (255, 255, 255), (214, 64, 32)
CELL = 26  # side in pixels of one weight
WIDTH, HEADS, PATCH, SIDE = 48, 4, 4, 32  # a patch of 4 x 4 pixels in 3 colours is a token of 48 numbers

PHRASES = {
    "guten morgen": "good morning",
    "gute nacht": "good night",
    "wie geht es dir": "how are you",
    "mir geht es gut": "i am fine",
    "ich bin müde": "i am tired",
    "ich bin hungrig": "i am hungry",
    "wo ist der bahnhof": "where is the station",
    "wo ist die katze": "where is the cat",
    "die katze schläft": "the cat sleeps",
    "der hund schläft": "the dog sleeps",
    "wo ist der hund": "where is the dog",
    "ich liebe dich": "i love you",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pictures", metavar="DIR", type=Path, nargs="?", help="colour pictures to learn from, such as data/emoji"
    )
    parser.add_argument("--out", type=Path, help="(docs/figures)")
    parser.add_argument("--steps", type=int, help="training steps of each network (600)")
    parser.add_argument(
        "--judge", type=Path, nargs=3, metavar=("JUDGE", "PICTURE", "FILE"), help="where its heads look, and no more"
    )
    options = parser.parse_args()
    try:
        print(made(options))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def made(options: argparse.Namespace) -> str:
    """Make what is asked for, and say what was written. Raises ValueError for options that do not go together."""
    if options.judge is not None:
        others = {"DIR": options.pictures, "--out": options.out, "--steps": options.steps}
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ValueError(f"--judge makes one figure, of a judge that is trained: leave out {', '.join(given)}")
        judge, picture, file = options.judge
        figure_of_judge(judge, picture).save(file, optimize=True)
        return f"wrote {file}"
    if options.pictures is None:
        raise ValueError("give DIR, colour pictures to learn from such as data/emoji, or --judge")
    steps = 600 if options.steps is None else options.steps
    if steps < 1:
        raise ValueError(f"--steps must be at least 1, got {steps}")
    out = options.out or Path("docs/figures")
    out.mkdir(parents=True, exist_ok=True)
    figure_of_masks().save(out / "masks.png")
    figure_of_translation(steps).save(out / "translation.png")
    figure_of_patches(options.pictures, steps).save(out / "patches.png")
    return f"wrote masks.png, translation.png and patches.png to {out}"


# -------------------------------------------------------------------------------------------------------------- drawing


def font(size: int = 15) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def heat(value: float) -> tuple[int, int, int]:
    """0 is paper, 1 is ink."""
    return tuple(round(p + (i - p) * value) for p, i in zip(PAPER, INK, strict=True))


def draw_matrix(weights: Tensor, rows: list[str], columns: list[str], title: str) -> Image.Image:
    """weights: (R, C) in [0, 1]; one square each, darker = more, with the rows' and columns' names."""
    left = 14 + max(round(font().getlength(name)) for name in rows)
    top = 40 + max(round(font().getlength(name)) for name in columns)
    width = max(left + CELL * len(columns), round(font().getlength(title))) + 24
    image = Image.new("RGB", (width, top + CELL * len(rows) + 10), PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((8, 6), title, INK, font())
    for c, name in enumerate(columns):
        label = Image.new("RGB", (top - 36, 22), PAPER)
        ImageDraw.Draw(label).text((0, 2), name, INK, font())
        image.paste(label.rotate(90, expand=True), (left + CELL * c + 2, 32))
    for r, name in enumerate(rows):
        draw.text((8, top + CELL * r + 4), name, INK, font())
        for c in range(len(columns)):
            x, y = left + CELL * c, top + CELL * r
            draw.rectangle((x, y, x + CELL - 2, y + CELL - 2), heat(float(weights[r, c])), outline=(200, 200, 200))
    return image


def side_by_side(images: list[Image.Image], gap: int = 12) -> Image.Image:
    width = sum(image.width for image in images) + gap * (len(images) - 1)
    sheet = Image.new("RGB", (width, max(image.height for image in images)), PAPER)
    x = 0
    for image in images:
        sheet.paste(image, (x, 0))
        x += image.width + gap
    return sheet


# ---------------------------------------------------------------------------------------------------------------- masks


def figure_of_masks() -> Image.Image:
    words = ["the", "cat", "sleeps", "(pad)"]
    padding = torch.tensor([1.0, 1.0, 1.0, 0.0]).expand(4, 4)
    causal = causal_mask(4)[0].float()
    masks = {"padding (B, Nk)": padding, "causal (1, N, N)": causal, "both, by &": padding * causal}
    return side_by_side([draw_matrix(0.75 * mask, words, words, title) for title, mask in masks.items()])


# ---------------------------------------------------------------------------------------------------------- translation


def figure_of_translation(steps: int) -> Image.Image:
    """Train on the phrases and show the last layer's cross-attention, the mean of its heads."""
    torch.manual_seed(0)
    german, english = (
        sorted({word for line in lines for word in line.split()}) for lines in (PHRASES, PHRASES.values())
    )
    german, english = ["(pad)", *german], ["(pad)", "(start)", "(end)", *english]
    source, target = (encode(PHRASES, german), encode((f"(start) {x} (end)" for x in PHRASES.values()), english))
    model = Transformer(len(german), len(english), dim=32, depth=1, heads=2, max_length=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        logits = model(source, target[:, :-1], source != 0)
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    weights = []
    attention = model.decoder[-1].cross_attention
    hook = attention.register_forward_hook(
        lambda module, inputs, _: weights.append(module.forward(*inputs, return_weights=True)[1].mean(dim=1))
    )
    row = list(PHRASES).index("wie geht es dir")
    with torch.no_grad():
        logits = model.eval()(source[row : row + 1], target[row : row + 1, :-1], source[row : row + 1] != 0)
    hook.remove()
    written = [english[i] for i in logits[0].argmax(-1)][:4]
    words = list(PHRASES)[row].split()
    return draw_matrix(weights[0][0, : len(written), : len(words)], written, words, "English word looks at German word")


def encode(lines: object, vocabulary: list[str]) -> Tensor:
    """(lines, longest line) ids, filled up with 0."""
    ids = [torch.tensor([vocabulary.index(word) for word in line.split()]) for line in lines]
    return nn.utils.rnn.pad_sequence(ids, batch_first=True)


# -------------------------------------------------------------------------------------------------------------- patches


class PatchNetwork(nn.Module):
    """Fills in hidden patches from those that are seen: two encoder layers of 4 heads x 12."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(0.1 * torch.randn((SIDE // PATCH) ** 2, WIDTH))
        self.hidden = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(EncoderLayer(WIDTH, HEADS, 4 * WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, patches: Tensor, seen: Tensor) -> Tensor:
        """patches: (B, N, 48); seen: (B, N) bool. Returns (B, N, 48)."""
        x = torch.where(seen[..., None], patches, self.hidden) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def figure_of_patches(folder: Path, steps: int) -> Image.Image:
    """Train on hidden patches, then show where the four heads of the first layer look from one patch."""
    pictures = load_pictures(folder)
    patches = rearrange(pictures, "b c (h p) (w q) -> b (h w) (c p q)", p=PATCH, q=PATCH)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    network = PatchNetwork()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        batch = patches[torch.randint(0, len(patches), (32,), generator=generator)]
        seen = torch.rand(batch.shape[:2], generator=generator) > 0.5
        loss = F.mse_loss(network(batch, seen)[~seen], batch[~seen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    chosen, place = patches[:1], 3 * (SIDE // PATCH) + 2
    seen = torch.ones(chosen.shape[:2], dtype=torch.bool)
    seen[0, place] = False
    layer = network.layers[0]
    with torch.no_grad():
        x = layer.attention_norm(torch.where(seen[..., None], chosen, network.hidden) + network.position)
        weights = layer.attention(x, x, x, return_weights=True)[1][0, :, place]
    return draw_heads(pictures[0], weights, place)


def load_pictures(folder: Path) -> Tensor:
    """(N, 3, 32, 32) in [-1, 1], at most 2000. Raises ValueError if there are none."""
    from unet_attn.images import load_image, resize_and_crop, to_tensor

    paths = sorted(folder.rglob("*.png"))[:2000]
    if not paths:
        raise ValueError(f"{folder} holds no PNG pictures: make some with scripts/prepare_emoji.py")
    return torch.stack([to_tensor(resize_and_crop(load_image(path), SIDE)) for path in paths])


def draw_heads(picture: Tensor, weights: Tensor, place: int) -> Image.Image:
    """The picture with the query's patch framed, and beside it each head's weights over the patches."""
    shown = enlarged(picture, 5)
    panels = {"a patch asks": shown}
    for head, grid in enumerate(relative_weights(weights), start=1):
        cells = Image.fromarray(((1 - grid) * 255).round().byte().numpy()).convert("RGB")
        panels[f"head {head} looks here"] = cells.resize(shown.size, Image.NEAREST)
    return framed_panels(panels, place, SIDE // PATCH)


def enlarged(picture: Tensor, scale: int) -> Image.Image:
    """A picture (C, H, W) in [-1, 1], C 1 or 3, each pixel a square of `scale`."""
    pixels = ((picture.expand(3, -1, -1) / 2 + 0.5) * 255).round().byte()
    image = Image.fromarray(rearrange(pixels, "c h w -> h w c").numpy())
    return image.resize((image.width * scale, image.height * scale), Image.NEAREST)


def relative_weights(weights: Tensor) -> Tensor:
    """What one patch takes from each, (heads, N), as maps (heads, rows, columns) whose largest value is 1."""
    side = isqrt(weights.shape[1])
    return rearrange(weights / weights.amax(dim=1, keepdim=True), "heads (h w) -> heads h w", h=side)


def framed_panels(panels: dict[str, Image.Image], place: int, side: int) -> Image.Image:
    """Pictures of one size, each under its title with patch number `place` of side x side framed."""
    sheets = []
    for title, picture in panels.items():
        panel = picture.copy()
        row, column = divmod(place, side)
        box = tuple(panel.width // side * each for each in (column, row, column + 1, row + 1))
        ImageDraw.Draw(panel).rectangle(box, outline=ACCENT, width=2)
        sheet = Image.new("RGB", (panel.width + 2, panel.height + 26), PAPER)
        sheet.paste(panel, (1, 25))
        draw = ImageDraw.Draw(sheet)
        draw.rectangle((0, 24, panel.width + 1, panel.height + 25), outline=(200, 200, 200))
        draw.text((0, 4), title, INK, font(14))
        sheets.append(sheet)
    return side_by_side(sheets)


# ---------------------------------------------------------------------------------------------------------------- judge


def figure_of_judge(folder: Path, path: Path) -> Image.Image:
    """Where each head of a trained judge's last layer looks from the patch that holds most of the drawing."""
    from unet_attn.images import load_image, resize_and_crop, to_tensor
    from unet_attn.judge import Judge

    judge = Judge.load(folder)
    size = judge.size
    picture = to_tensor(resize_and_crop(load_image(path, channels=size.channels), size.image_size))
    place = fullest_patch(picture, size.patch_size)
    weights = judge.eye.attention_weights(picture[None])[0, :, place]

    shown = enlarged(picture, 160 // size.image_size or 1)
    # the drawing stays to be seen under the strongest colour
    tint = Image.new("RGB", shown.size, ACCENT)
    panels = {"a patch asks": shown}
    for head, grid in enumerate(relative_weights(weights), start=1):
        mask = Image.fromarray((grid * 170).round().byte().numpy()).resize(shown.size, Image.NEAREST)
        panels[f"head {head} looks here"] = Image.composite(tint, shown, mask)
    return framed_panels(panels, place, judge.eye.grid)


def fullest_patch(picture: Tensor, patch_size: int) -> int:
    """The number of the patch whose pixels differ most from the picture's corner. picture: (C, H, W)."""
    drawn = (picture - picture[:, :1, :1]).abs()
    patches = rearrange(drawn, "c (h p) (w q) -> (h w) (c p q)", p=patch_size, q=patch_size)
    return int(patches.sum(dim=1).argmax())


if __name__ == "__main__":
    sys.exit(main())
