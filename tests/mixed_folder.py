"""A folder as people have them: modes, formats, EXIF orientations, odd names, three levels deep, and bad files."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, features

PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
SUFFIX = {"JPEG": "jpg", "TIFF": "tif", "JPEG2000": "jp2"}
NAMES = ("猫 1", "naïve é", "a b (2)", "x.y.z", "#50%&'", "-dash")


class Mixed(NamedTuple):
    """The names of the pictures that were written, those that can be used and those that cannot."""

    good: set[str]
    bad: set[str]


def noise(seed: int, width: int = 41, height: int = 31) -> Image.Image:
    """A picture that differs from all others and that no codec can shrink to nothing."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
    grain = random.integers(-20, 21, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(picture) + grain, 0, 255).astype(np.uint8))


def in_mode(picture: Image.Image, mode: str) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
    return picture.convert(mode)


def write_mixed_folder(folder: Path, *, bad: bool = True) -> Mixed:
    """Write the folder, each good picture with a caption in a text file."""
    seeds = iter(range(10_000))
    pictures: dict[str, Image.Image] = {}
    saving: dict[str, dict[str, object]] = {}

    for mode in PNG_MODES:
        pictures[f"modes/{mode.replace(';', '_')}.png"] = in_mode(noise(next(seeds)), mode)
    pictures["modes/cmyk.JPG"] = noise(next(seeds)).convert("CMYK")
    pictures["modes/lzw.tiff"] = noise(next(seeds), 23, 47)
    saving["modes/lzw.tiff"] = {"compression": "tiff_lzw"}
    pictures["modes/deep.tiff"] = in_mode(noise(next(seeds)), "I;16")
    for kind in FORMATS + (("AVIF",) if features.check("avif") else ()):
        name = f"formats/deeper/{kind.lower()}.{SUFFIX.get(kind, kind.lower())}"
        pictures[name], saving[name] = noise(next(seeds), 37, 53), {"format": kind}
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        name = f"phone/2024/05/IMG_{orientation}.JPEG"
        pictures[name], saving[name] = noise(next(seeds)), {"exif": exif, "quality": 90}
    for name in NAMES:
        pictures[f"odd names/{name}.png"] = noise(next(seeds), 29, 29)
    frames = [noise(next(seeds)) for _ in range(3)]
    for kind in ("gif", "webp", "png"):
        pictures[f"moving/{kind}.{kind}"] = frames[0]
        saving[f"moving/{kind}.{kind}"] = {"save_all": True, "append_images": frames[1:], "duration": 50}
    pictures["strip.png"], pictures["dot.png"] = noise(next(seeds), 200, 3), noise(next(seeds), 1, 1)

    for number, (name, picture) in enumerate(pictures.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, **saving.get(name, {}))
        path.with_name(f"{path.name.rpartition('.')[0]}.txt").write_text(f"picture number {number}", encoding="utf-8")
    for name in (".hidden.png", "._strip.png", "Thumbs.db", ".git/x.png", "__MACOSX/strip.png", "notes.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"no picture")
    return Mixed(set(pictures), write_bad_files(folder) if bad else set())


def write_bad_files(folder: Path) -> set[str]:
    """One file of each kind of fault; returns the names of the pictures that they make unusable."""
    (folder / "bad").mkdir()
    noise(1).save(folder / "bad/cut.jpg")
    whole = (folder / "bad/cut.jpg").read_bytes()
    (folder / "bad/cut.jpg").write_bytes(whole[: int(0.6 * len(whole))])
    (folder / "bad/empty.png").write_bytes(b"")
    (folder / "bad/text.jpg").write_text("just text")
    (folder / "bad/page.webp").write_text("<html><body>404 not found</body></html>")
    Image.new("F", (5, 3), 0.5).save(folder / "bad/float.tif")
    Image.new("1", (20_000, 20_000)).save(folder / "bad/bomb.png")
    noise(2).save(folder / "bad/caption.png")
    (folder / "bad/caption.txt").write_bytes(b"a cat\x92s hat")
    return {f"bad/{name}" for name in ("cut.jpg", "empty.png", "text.jpg", "page.webp", "float.tif", "bomb.png")} | {
        "bad/caption.png"
    }
