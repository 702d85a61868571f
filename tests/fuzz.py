"""Damaged pictures, captions and tables by the thousand: each must be read, or named with a reason.

    python tests/fuzz.py [--cases 10000] [--seed 0] [--minutes 10]

Seeded, so that a failure can be made again: its seed and number are printed, and --first starts there. A case that
crashes, takes over SECONDS or needs much memory is a failure. Exit code 1 if there was one.
"""

import argparse
import faulthandler
import io
import json
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from mixed_folder import FORMATS, PNG_MODES, in_mode, noise
from PIL import Image, features

from unet_attn.data import CaptionedImages, DataError, DataOptions, ImageError, load_image
from unet_attn.sources import find_pictures

SECONDS = 10  # for one case
MAX_PIXELS = 1 << 20
MAX_MEMORY = 1 << 30  # bytes above what the process had at the start
NUMBERS = (0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)  # what overflows or underflows
CHECKED_TOGETHER = 16  # files of a folder

Case = Callable[[random.Random, Path], str]  # returns what became of it: "read" or the kind of fault


class Failure(AssertionError):
    """Something that must not happen to any input."""


# ---- what is damaged


def picture_seeds() -> list[bytes]:
    """A small picture of every format and mode, some with EXIF data, palettes, transparency and several frames."""
    pictures = [(in_mode(noise(n, 19, 13), mode), "PNG", {}) for n, mode in enumerate(PNG_MODES)]
    kinds = [*FORMATS, *(["AVIF"] if features.check("avif") else [])]
    pictures += [(noise(20 + n, 23, 17), kind, {}) for n, kind in enumerate(kinds)]
    exif = Image.Exif()
    exif[0x0112] = 6
    pictures += [(noise(40, 31, 23), kind, {"exif": exif}) for kind in ("JPEG", "PNG", "WEBP", "TIFF")]
    pictures += [(noise(41, 31, 23), "JPEG", {"progressive": True}), (noise(42).convert("CMYK"), "JPEG", {})]
    pictures += [(noise(43, 19, 13), "TIFF", {"compression": kind}) for kind in ("tiff_lzw", "tiff_deflate", "jpeg")]
    frames = [noise(50 + n, 11, 11) for n in range(3)]
    pictures += [(frames[0], kind, {"save_all": True, "append_images": frames}) for kind in ("GIF", "PNG", "WEBP")]
    return [saved(picture, kind, options) for picture, kind, options in pictures]


def saved(picture: Image.Image, kind: str, options: dict[str, object]) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def caption_seeds() -> list[bytes]:
    texts = ["a cat's hat", "naïve é 猫 🎈", "one\r\ntwo", "x" * 3000]
    encodings = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "shift-jis")
    return [text.encode(encoding, "replace") for text in texts for encoding in encodings]


def table_seeds() -> dict[str, list[bytes]]:
    rows = [{"file_name": "a.png", "text": "one"}, {"file_name": "sub/b.png", "text": ["two", "drei 🎈"]}]
    rows += [{"file_name": "gone.png", "text": None}, {"file_name": "../a.png", "text": 3, "more": {"x": [1, {}]}}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    table = 'file_name,text\na.png,"one, two"\nsub/b.png,"line\nbreak"\ngone.png,x,y\n'
    seeds = {"metadata.jsonl": [lines.encode(), lines.encode("utf-8-sig")], "metadata.csv": [table.encode()]}
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        return seeds
    columns = pyarrow.table({"file_name": ["a.png", "sub/b.png"], "text": [["one"], ["two", "three"]]})
    for compression in ("snappy", "none", "zstd"):
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(columns, sink, compression=compression)
        seeds.setdefault("metadata.parquet", []).append(sink.getvalue().to_pybytes())
    return seeds


def damaged(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """One to four random changes."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        how = draw.randrange(8)
        if how == 0:
            del changed[at:]
        elif how == 1:
            del changed[at : at + draw.randint(1, 64)]
        elif how == 2:
            changed[at:at] = draw.randbytes(draw.randint(1, 64))
        elif how == 3:
            changed[at : at + draw.randint(1, 32)] = draw.randbytes(draw.randint(1, 32))
        elif how == 4:
            width, order = draw.choice((1, 2, 4)), draw.choice(("big", "little"))
            changed[at : at + width] = (draw.choice(NUMBERS) & (256**width - 1)).to_bytes(width, order)
        elif how == 5:
            other = draw.choice(others)
            cut = draw.randrange(len(other) + 1)
            changed[at:] = other[cut:]
        elif how == 6:
            changed[at:at] = changed[at // 2 : at] * draw.randint(1, 8)
        elif changed:
            for _ in range(draw.randint(1, 16)):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


# ---- what must hold


def make_cases() -> list[tuple[int, Case]]:
    """The kinds of cases with their shares."""
    pictures, captions, tables = picture_seeds(), caption_seeds(), table_seeds()

    def picture(draw: random.Random, folder: Path) -> str:
        channels = draw.choice((1, 3))
        data = damaged(draw.choice(pictures), pictures, draw)
        try:
            image = load_image(io.BytesIO(data), channels=channels, max_pixels=MAX_PIXELS)
        except ImageError as error:
            if not error.reason.strip() or not error.kind:
                raise Failure("a fault without a reason") from error
            return error.kind
        if image.mode != ("L" if channels == 1 else "RGB") or not 0 < image.width * image.height <= MAX_PIXELS:
            raise Failure(f"decoded to {image.mode} {image.size}")
        return "read"

    def caption(draw: random.Random, folder: Path) -> str:
        (folder / "a.png").touch()
        (folder / "a.txt").write_bytes(damaged(draw.choice(captions), captions, draw))
        return looked_at(folder, pictures=1)

    def table(draw: random.Random, folder: Path) -> str:
        (folder / "sub").mkdir()
        (folder / "a.png").touch()
        (folder / "sub/b.png").touch()
        name = draw.choice(list(tables))
        (folder / name).write_bytes(damaged(draw.choice(tables[name]), tables[name], draw))
        return looked_at(folder, pictures=2)

    def whole(draw: random.Random, folder: Path) -> str:
        for number in range(CHECKED_TOGETHER):
            suffix = draw.choice(("png", "JPG", "webp", "gif", "tif"))
            (folder / f"{number} é.{suffix}").write_bytes(damaged(draw.choice(pictures), pictures, draw))
        options = DataOptions(path=str(folder), resolution=16, on_error="skip", max_pixels=MAX_PIXELS, buckets=True)
        try:
            images = CaptionedImages(options, require_captions=False, multiple_of=4)
        except DataError as error:
            missing = [path.name for path in folder.iterdir() if path.name not in str(error)]
            if missing:
                raise Failure(f"all are bad, but {missing} are not named") from error
            return "all bad"
        if len(images) + len(images.faults) != CHECKED_TOGETHER:
            raise Failure(f"{len(images)} read and {len(images.faults)} named of {CHECKED_TOGETHER}")
        for index in range(len(images)):
            image = images[index]["image"]
            if not (image.isfinite().all() and image.abs().max() <= 1):
                raise Failure("pixels out of range")
        return "read"

    return [(60, picture), (18, caption), (20, table), (2, whole)]


def looked_at(folder: Path, *, pictures: int) -> str:
    """Find pictures and captions; each picture is there or its caption file is named, and all can be printed."""
    found = find_pictures(folder)
    if len(found.paths) + sum(fault.kind == "caption" for fault in found.faults) != pictures:
        raise Failure(f"{len(found.paths)} pictures and {len(found.faults)} faults of {pictures}")
    for text in [*(str(fault) for fault in found.faults), *(text for texts in found.captions for text in texts)]:
        text.encode("utf-8")  # what is printed or tokenized must be whole characters
    if any(not fault.reason.strip() for fault in found.faults):
        raise Failure("a fault without a reason")
    return found.faults[0].kind if found.faults else "read"


def run(cases: int, seed: int, *, first: int = 0, minutes: float = 10) -> tuple[Counter[str], list[str]]:
    """Run cases number `first` to `first + cases`, at most so many minutes. Returns outcomes and failures."""
    kinds = make_cases()
    shares, chosen = [share for share, _ in kinds], [case for _, case in kinds]
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end = time.monotonic() + 60 * minutes
    for number in range(first, first + cases):
        draw = random.Random(f"{seed} {number}")
        (case,) = draw.choices(chosen, shares)
        began = time.monotonic()
        if began > end:
            failures.append(f"time is up after {number - first} cases")
            break
        faulthandler.dump_traceback_later(SECONDS, exit=True)  # a hang inside a decoder can only be ended so
        try:
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, of odd EXIF data
                outcomes[f"{case.__name__}: {case(draw, Path(folder))}"] += 1
        except Exception as error:  # whatever it is, it must not come out
            failures.append(f"--seed {seed} --first {number}: {case.__name__}: {type(error).__name__}: {error}")
        finally:
            faulthandler.cancel_dump_traceback_later()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        if 1024 * grown > MAX_MEMORY:
            failures.append(f"--seed {seed} --first {number}: {case.__name__}: {grown >> 10} MiB more memory")
            break
    return outcomes, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the first case")
    parser.add_argument("--minutes", type=float, default=10, help="give up after so long")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as caches:  # the user's own has no use for them
        os.environ["XDG_CACHE_HOME"] = caches
        outcomes, failures = run(options.cases, options.seed, first=options.first, minutes=options.minutes)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:6} {outcome}")
    print(f"{sum(outcomes.values())} cases in {time.monotonic() - began:.0f} s, {len(failures)} failures")
    print("\n".join(failures[:20]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
