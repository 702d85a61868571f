"""Make a captioned data set of colour emoji from npm packages.

    python scripts/prepare_emoji.py --out data/emoji

Each emoji of Google's Noto and of Twemoji becomes a PNG on white; its captions are its name, and its name with a few of
its tags. The packages are fetched with `npm pack` once and kept in the user's cache folder.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from _folder import fresh_folder, refuse_filled, write_metadata

from unet_attn.data import load_image, resize_and_crop

NAMES = "emojibase-data@17.0.0"
NAMES_FILE = "package/en/data.json"
COMPONENTS = 2  # emojibase's group of hair and skin parts, which are no pictures of their own
MAX_TAGS = 5  # so that the longer caption fits 32 tokens


class Drawings(NamedTuple):
    """One artist's set: its name, the npm package that holds its 64 px pictures, and the pictures' licence."""

    name: str
    package: str
    licence: str


DRAWINGS = (
    Drawings(
        "google",
        "emoji-datasource-google@16.0.0",
        "Noto Emoji (Google), Apache License 2.0, https://github.com/googlefonts/noto-emoji",
    ),
    Drawings(
        "twitter",
        "emoji-datasource-twitter@16.0.0",
        "Twemoji (Twitter and contributors), CC-BY 4.0, https://github.com/jdecked/twemoji",
    ),
)
NAMES_LICENCE = "names and tags: emojibase-data, MIT License, https://github.com/milesj/emojibase (from Unicode CLDR)"


def cache_folder() -> Path:
    """Where fetched packages stay, outside the project and the data. Raises ValueError if there is no home folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base == "~/.cache":
        raise ValueError("there is no home folder to keep the packages in: set XDG_CACHE_HOME")
    return Path(base) / "unet-attn" / "npm"


def fetch(package: str, cache: Path) -> Path:
    """The package's archive, from the cache or by `npm pack`; whole or absent in the cache. Raises ValueError."""
    archive = cache / (package.replace("@", "-") + ".tgz")
    if archive.exists():
        return archive
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError(f"npm is not installed: install Node.js, which brings it (needed for `npm pack {package}`)")
    print(f"fetching {package}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=cache) as partial:
        done = subprocess.run([npm, "pack", "--silent", package], cwd=partial, capture_output=True, text=True)
        if done.returncode or not (Path(partial) / archive.name).exists():
            last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise ValueError(f"npm pack {package} failed: {last}")
        os.replace(Path(partial) / archive.name, archive)
    return archive


def key_of(hexcode: str) -> str:
    """One spelling of a code sequence for both sources: no variation selector, no leading zeros, upper case."""
    return "-".join(code.lstrip("0") for code in hexcode.upper().split("-") if code != "FE0F")


def captions_of(entry: dict) -> list[str]:
    """The name, and the name with those tags that add a word to it."""
    name = entry["label"]
    tags = [tag for tag in entry.get("tags", []) if tag.lower() not in name.lower()][:MAX_TAGS]
    return [name, f"{name}, {', '.join(tags)}"] if tags else [name]


def captions_by_key(archive: Path, skin_tones: bool) -> dict[str, list[str]]:
    """Captions of every emoji, in the order of emojibase; skin-tone variants only if asked for."""
    with tarfile.open(archive) as package:
        entries = json.load(package.extractfile(NAMES_FILE))
    found: dict[str, list[str]] = {}
    for entry in entries:
        if entry.get("group", COMPONENTS) == COMPONENTS:
            continue
        found[key_of(entry["hexcode"])] = captions_of(entry)
        for skin in entry.get("skins", []) if skin_tones else []:
            found[key_of(skin["hexcode"])] = captions_of({**skin, "tags": entry.get("tags", [])})
    return found


def pictures(archive: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """(key, PNG bytes) of the archive's 64 px pictures."""
    folder = PurePosixPath("package/img") / name / "64"
    with tarfile.open(archive) as package:
        for member in package:
            path = PurePosixPath(member.name)
            if path.parent == folder and path.suffix == ".png":
                yield key_of(path.stem), package.extractfile(member).read()


def write(archives: dict[str, Path], captions: dict[str, list[str]], out: Path, size: int) -> dict[str, int]:
    """Draw all captioned emoji of all sets into `out` with metadata.jsonl and LICENSES.txt. Returns the counts."""
    order = {key: place for place, key in enumerate(captions)}
    with fresh_folder(out) as folder:
        rows: list[dict[str, str | list[str]]] = []
        counts = {}
        for drawings in DRAWINGS:
            (folder / drawings.name).mkdir()
            found = {key: data for key, data in pictures(archives[drawings.name], drawings.name) if key in captions}
            for key in sorted(found, key=order.__getitem__):
                file_name = f"{drawings.name}/{key.lower()}.png"
                resize_and_crop(load_image(io.BytesIO(found[key])), size).save(folder / file_name)
                rows.append({"file_name": file_name, "text": captions[key]})
            counts[drawings.name] = len(found)
        write_metadata(folder, rows)
        (folder / "LICENSES.txt").write_text(
            "".join(f"{drawings.name}/: {drawings.licence}\n" for drawings in DRAWINGS) + f"{NAMES_LICENCE}\n",
            encoding="utf-8",
        )
    return counts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to make; must not exist or be empty")
    parser.add_argument("--size", type=int, default=32, help="side of the pictures in pixels, 8 to 64 (default 32)")
    parser.add_argument("--skin-tones", action="store_true", help="the skin-tone variants too")
    arguments = parser.parse_args()
    if not 8 <= arguments.size <= 64:
        parser.error(f"--size must be 8 to 64, the size of the drawings, got {arguments.size}")
    return arguments


def main() -> None:
    arguments = parse()
    refuse_filled(arguments.out)
    cache = cache_folder()
    names = fetch(NAMES, cache)
    archives = {drawings.name: fetch(drawings.package, cache) for drawings in DRAWINGS}
    try:
        counts = write(archives, captions_by_key(names, arguments.skin_tones), arguments.out, arguments.size)
    except (tarfile.TarError, EOFError, KeyError) as error:
        raise ValueError(f"a package in {cache} is damaged ({error}); remove that folder and run again") from error
    print(f"wrote {sum(counts.values())} pictures of {arguments.size} px to {arguments.out}")
    for drawings in DRAWINGS:
        print(f"  {counts[drawings.name]:5d}  {drawings.licence}")
    print(f"         {NAMES_LICENCE}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
