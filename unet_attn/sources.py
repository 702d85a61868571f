"""Finding the pictures and captions of a folder, and saying what is wrong with them.

Three ways to keep captions are told apart by looking: a table `metadata.jsonl`, `.csv` or `.parquet` (see
unet_attn.metadata), a text file beside each picture (`dog.jpg`, `dog.txt`), and one sub-folder per class. A row of a
table goes before a text file. Everything here only reads; a fault is collected, never raised, so that one look at a
folder tells everything that is wrong with it.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from unet_attn.faults import CAPTION, FOLDER, MAX_CAPTION_BYTES, DataError, Fault, one_line, read_text, shown, why
from unet_attn.metadata import METADATA_NAMES, composed, metadata_captions

IMAGE_EXTENSIONS = (
    ".jpg .jpeg .jpe .jfif .png .apng .webp .gif .bmp .dib .tif .tiff .pbm .pgm .ppm .pnm .jp2 .avif".split()
)
# Pictures that a person would miss, in formats that Pillow alone does not read.
OTHER_PICTURES = frozenset(".heic .heif .svg .psd .raw .dng .cr2 .cr3 .nef .arw .jxl .tga .ico .eps .pdf".split())
SYSTEM_NAMES = frozenset({"thumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin"})


class Found(NamedTuple):
    """What a data set holds: its pictures in order, the captions of each ([] = none), and remarks."""

    pictures: Sequence[Path | BinaryIO]  # what load_image takes
    paths: list[Path]  # what messages call each picture
    captions: list[list[str]]
    kind: str  # where the captions come from, for the summary
    faults: list[Fault]
    notes: list[str]
    stamps: list[str | None] | None = None  # of each picture, another when it may have changed; None: ask the files


def find_pictures(
    folder: Path, caption_extension: str = ".txt", *, class_template: str = "{}", text_column: str = "text"
) -> Found:
    """Look through `folder` and all folders in it for pictures and their captions.

    `caption_extension` may come with or without its dot. A caption file has the picture's name up to the last dot,
    letter case included; extensions match in any case ("a.JPG" has "a.txt" or "a.TXT"). `class_template` makes a
    caption of a class folder's name, `text_column` is the captions' column in tables.
    Raises DataError if there is no such folder or no picture in it.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        hub = "; for a data set of the hub, set data.image_column" if len(folder.parts) == 2 else ""
        raise DataError(f"data folder {shown(folder)} {what}: 0 pictures found ({accepted()}){hub}")
    faults: list[Fault] = []
    files, ignored = walk(folder, faults)
    paths = [path for path in files if path.suffix.lower() in IMAGE_EXTENSIONS]
    if not paths:
        unread = _unread_pictures(files)
        reason = f"; {unread}" if unread else ""
        raise DataError(f"data folder {shown(folder)} holds 0 pictures among {len(files)} files ({accepted()}){reason}")

    suffix = "." + caption_extension.lstrip(".").lower()
    tables = [path for path in files if path.name.lower() in METADATA_NAMES]
    notes: list[str] = []
    rows = metadata_captions(tables, paths, faults, notes, text_column)
    beside, bad = _sidecar_captions([path for path in paths if path not in rows], files, suffix, faults)
    captions = [rows.get(path) or beside.get(path) or [] for path in paths]
    kind = _kind(tables, suffix, rows, beside)
    notes += _notes(files, paths, captions, suffix)
    if ignored:
        notes.append(ignored)
    if not tables and not beside and not bad and not _other_suffixes(files, paths, suffix):
        classes, class_kind = _class_captions(folder, paths, class_template)
        if classes:
            captions, kind = classes, class_kind
    if bad:  # a picture whose caption cannot be read goes with it
        kept = [i for i, path in enumerate(paths) if path not in bad]
        paths, captions = [paths[i] for i in kept], [captions[i] for i in kept]
    return Found(paths, paths, captions, kind, faults, notes)


def accepted() -> str:
    return "accepted: " + " ".join(IMAGE_EXTENSIONS) + ", in any folder below, any letter case"


def walk(folder: Path, faults: list[Fault]) -> tuple[list[Path], str]:
    """All files below `folder`, sorted, without hidden and system files; and a remark on how many of those were."""

    def unlisted(error: OSError) -> None:
        faults.append(Fault(Path(error.filename or folder), f"cannot be listed ({error.strerror})", FOLDER))

    files, hidden, hidden_folders, visited = [], 0, 0, set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=unlisted):
        real = os.path.realpath(parent)
        if real in visited:  # a link that leads back up
            folders.clear()
            continue
        visited.add(real)
        hidden_folders += sum(map(_is_hidden, folders))
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        hidden += sum(map(_is_hidden, names))
        files += [Path(parent, name) for name in names if not _is_hidden(name)]
    counts = [f"{hidden} files"] * bool(hidden) + [f"{hidden_folders} folders"] * bool(hidden_folders)
    return sorted(files), f"hidden or system: {' and '.join(counts)} ignored" if counts else ""


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


# ---- a text file beside each picture


def _sidecar_captions(
    paths: list[Path], files: list[Path], suffix: str, faults: list[Fault]
) -> tuple[dict[Path, list[str]], set[Path]]:
    """The captions of the pictures that have a caption file with words in it, and the pictures whose file is bad."""
    by_stem: dict[str, Path] = {}
    for path in files:
        if path.name.lower().endswith(suffix):
            by_stem.setdefault(composed(str(path)[: -len(suffix)]), path)
    found, bad = {}, set()
    for path in paths:
        sidecar = by_stem.get(composed(str(path.with_suffix(""))))
        if sidecar is None:
            continue
        try:
            if not sidecar.is_file() or sidecar.stat().st_size > MAX_CAPTION_BYTES:
                raise ValueError(f"is no caption: not a regular file of at most {MAX_CAPTION_BYTES} bytes")
            caption = one_line(read_text(sidecar))
        except (ValueError, OSError) as error:
            faults.append(Fault(sidecar, why(error), CAPTION))
            bad.add(path)
            continue
        if caption:
            found[path] = [caption]
    return found, bad


# ---- class folders, and the remarks of the summary


def _class_captions(folder: Path, paths: list[Path], template: str) -> tuple[list[list[str]], str]:
    """The captions from the names of the folders that the pictures lie in, and what to call that.

    Both are empty unless all pictures lie in two or more sub-folders.
    """
    parents = sorted({path.parent for path in paths})
    if len(parents) < 2 or folder in parents:
        return [], ""
    names = {parent: _words(parent.name) for parent in parents}
    several = ", ".join(list(dict.fromkeys(names.values()))[:5]) + (", ..." if len(parents) > 5 else "")
    captions = [[template.replace("{}", names[path.parent])] if names[path.parent] else [] for path in paths]
    return captions, f"the names of {len(parents)} folders ({several})"


def _words(name: str) -> str:
    """A folder's name as a caption, without the bytes that are no text."""
    return one_line(name.encode("utf-8", "ignore").decode().replace("_", " ").replace("-", " "))


def _kind(tables: list[Path], suffix: str, rows: dict[Path, list[str]], beside: dict[Path, list[str]]) -> str:
    kinds = sorted({path.name for path in tables}) if any(rows.values()) else []
    return " and ".join([*kinds, *([f"{suffix} files"] if beside else [])]) or "none"


def _other_suffixes(files: list[Path], paths: list[Path], suffix: str) -> Counter[str]:
    """Extensions of files that have a picture's name but are no captions: perhaps they should be."""
    stems = {path.with_suffix("") for path in paths}
    found = Counter(path.suffix for path in files if path.with_suffix("") in stems)
    return Counter(
        {s: n for s, n in found.items() if s and s.lower() not in {*IMAGE_EXTENSIONS, *OTHER_PICTURES, suffix}}
    )


def _unread_pictures(files: list[Path]) -> str:
    unread = Counter(path.suffix.lower() for path in files if path.suffix.lower() in OTHER_PICTURES)
    listed = ", ".join(f"{count} {suffix}" for suffix, count in sorted(unread.items()))
    return f"not read: {listed} (convert them to JPEG or PNG)" if listed else ""


def _notes(files: list[Path], paths: list[Path], captions: list[list[str]], suffix: str) -> list[str]:
    notes = [_unread_pictures(files)]
    if not all(captions):
        misnamed = [path for path in files if path.name.lower().startswith("metadata.")]
        misnamed = [path for path in misnamed if path.name.lower() not in METADATA_NAMES and path not in paths]
        if misnamed:
            notes.append(
                f"{shown(misnamed[0])} is not read: a table of captions is called {' or '.join(METADATA_NAMES)}"
            )
        for other, count in _other_suffixes(files, paths, suffix).most_common(1):
            notes.append(f"{count} files {other} have pictures' names: captions? Then set caption_extension to {other}")
    return [note for note in notes if note]
