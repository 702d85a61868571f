"""Finding the pictures and captions of a folder, and saying what is wrong with them.

Three ways to keep captions are told apart by looking: `metadata.jsonl` or `metadata.csv` (columns `file_name`, relative
to the metadata file, and `text`), a text file beside each picture (`dog.jpg`, `dog.txt`), and one sub-folder per class.
A row of a metadata file goes before a text file. Everything here only reads; a fault is collected, never raised, so
that one look at a folder tells everything that is wrong with it.
"""

import csv
import io
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

IMAGE_EXTENSIONS = (
    ".jpg .jpeg .jpe .jfif .png .apng .webp .gif .bmp .dib .tif .tiff .pbm .pgm .ppm .pnm .jp2 .avif".split()
)
# Pictures that a person would miss, in formats that Pillow alone does not read.
OTHER_PICTURES = frozenset(".heic .heif .svg .psd .raw .dng .cr2 .cr3 .nef .arw .jxl .tga .ico .eps .pdf".split())
METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
SYSTEM_NAMES = frozenset({"thumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin"})
MAX_CAPTION_BYTES = 1 << 20  # a caption file of more is no caption


class DataError(ValueError):
    """A data folder that cannot be trained on. The first line says what and where, further lines list the files."""


class Fault(NamedTuple):
    """A file that cannot be used, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{shown(self.path)}: {self.reason}"


class Found(NamedTuple):
    """What a folder holds: pictures in the order of their paths, the captions of each ([] = none), and remarks."""

    paths: list[Path]
    captions: list[list[str]]
    kind: str  # where the captions come from, for the summary
    faults: list[Fault]
    notes: list[str]


def shown(path: Path) -> str:
    """The path as text that can be printed, whatever bytes a file system put into it."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def find_pictures(folder: Path, caption_extension: str = ".txt") -> Found:
    """Look through `folder` and all folders in it for pictures and their captions.

    `caption_extension` may come with or without its dot. A caption file has the picture's name up to the last dot,
    letter case included; extensions match in any case ("a.JPG" has "a.txt" or "a.TXT").
    Raises DataError if there is no such folder or no picture in it.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"data folder {shown(folder)} {what}: 0 pictures found ({accepted()})")
    faults: list[Fault] = []
    files, hidden = _walk(folder, faults)
    paths = [path for path in files if path.suffix.lower() in IMAGE_EXTENSIONS]
    if not paths:
        unread = _unread_pictures(files)
        why = f"; {unread}" if unread else ""
        raise DataError(f"data folder {shown(folder)} holds 0 pictures among {len(files)} files ({accepted()}){why}")

    suffix = "." + caption_extension.lstrip(".").lower()
    metadata = [path for path in files if path.name.lower() in METADATA_NAMES]
    notes: list[str] = []
    rows = _metadata_captions(metadata, paths, faults, notes)
    beside, bad = _sidecar_captions([path for path in paths if path not in rows], files, suffix, faults)
    captions = [rows.get(path) or beside.get(path) or [] for path in paths]
    kind = _kind(metadata, suffix, rows, beside)
    notes += _notes(files, paths, captions, hidden, suffix)
    if not metadata and not beside and not bad and not _other_suffixes(files, paths, suffix):
        classes = _class_captions(folder, paths)
        if classes:
            captions, kind = classes, f"the names of {len({tuple(c) for c in classes})} folders"
    if bad:  # a picture whose caption cannot be read goes with it
        kept = [i for i, path in enumerate(paths) if path not in bad]
        paths, captions = [paths[i] for i in kept], [captions[i] for i in kept]
    return Found(paths, captions, kind, faults, notes)


def accepted() -> str:
    return "accepted: " + " ".join(IMAGE_EXTENSIONS) + ", in any folder below, any letter case"


def _walk(folder: Path, faults: list[Fault]) -> tuple[list[Path], int]:
    """All files below `folder`, sorted, without hidden and system files; and how many of those there were."""

    def unlisted(error: OSError) -> None:
        faults.append(Fault(Path(error.filename or folder), f"cannot be listed ({error.strerror})"))

    files, hidden, visited = [], 0, set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=unlisted):
        real = os.path.realpath(parent)
        if real in visited:  # a link that leads back up
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        hidden += sum(_is_hidden(name) for name in names)
        files += [Path(parent, name) for name in names if not _is_hidden(name)]
    return sorted(files), hidden


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, with or without a byte order mark.

    Raises ValueError giving the byte offset if it is not UTF-8 (never guesses another encoding), OSError if unreadable.
    """
    data = path.read_bytes()
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError("is UTF-16, not UTF-8 (byte order mark at byte 0): save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # error.object lacks the mark that utf-8-sig cut off
        offset = error.start + len(data) - len(error.object)
        raise ValueError(f"is not UTF-8 at byte {offset} (0x{data[offset]:02x}): save it as UTF-8") from None
    if "\0" in text:
        offset = data.index(b"\0")
        raise ValueError(f"has a zero byte at byte {offset}, so it is not UTF-8 text (UTF-16?): save it as UTF-8")
    return text


def one_line(text: str) -> str:
    """A caption without line breaks and doubled blanks."""
    return " ".join(text.split())


# ---- a text file beside each picture


def _sidecar_captions(
    paths: list[Path], files: list[Path], suffix: str, faults: list[Fault]
) -> tuple[dict[Path, list[str]], set[Path]]:
    """The captions of the pictures that have a caption file with words in it, and the pictures whose file is bad."""
    by_stem: dict[str, Path] = {}
    for path in files:
        if path.name.lower().endswith(suffix):
            by_stem.setdefault(_key(str(path)[: -len(suffix)]), path)
    found, bad = {}, set()
    for path in paths:
        sidecar = by_stem.get(_key(str(path.with_suffix(""))))
        if sidecar is None:
            continue
        try:
            if not sidecar.is_file() or sidecar.stat().st_size > MAX_CAPTION_BYTES:
                raise ValueError(f"is no caption: not a regular file of at most {MAX_CAPTION_BYTES} bytes")
            caption = one_line(read_text(sidecar))
        except (ValueError, OSError) as error:
            faults.append(Fault(sidecar, _reason(error)))
            bad.add(path)
            continue
        if caption:
            found[path] = [caption]
    return found, bad


def _key(text: str) -> str:
    """Names are compared composed: macOS writes "é" as two characters, most other systems as one."""
    return unicodedata.normalize("NFC", text)


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


# ---- metadata.jsonl and metadata.csv


def _metadata_captions(
    metadata: list[Path], paths: list[Path], faults: list[Fault], notes: list[str]
) -> dict[Path, list[str]]:
    """The captions by picture of all metadata files; several rows of one picture are several captions of it."""
    known = {_key(str(path)): path for path in paths}
    found: dict[Path, list[str]] = {}
    for source in metadata:
        for line, row in _rows(source, faults, notes):
            try:
                picture = _picture_of(row, source, known)
                found.setdefault(picture, []).extend(_texts(row))
            except ValueError as error:
                faults.append(Fault(source, f"line {line}: {error}"))
    return found


def _rows(source: Path, faults: list[Fault], notes: list[str]) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line number from 1, row); what cannot be parsed becomes a fault, blank lines in between become a note."""
    try:
        text = read_text(source)
    except (ValueError, OSError) as error:
        faults.append(Fault(source, _reason(error)))
        return
    if source.suffix.lower() == ".csv":
        yield from _csv_rows(source, text, faults)
        return
    lines = text.rstrip().split("\n")  # nothing else ends a row: JSON strings may hold other line separators
    blank = [number for number, content in enumerate(lines, start=1) if not content.strip()]
    if blank:
        notes.append(f"{shown(source)}: {len(blank)} blank lines ignored, the first is line {blank[0]}")
    for line, content in enumerate(lines, start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            faults.append(Fault(source, f"line {line}: broken JSON ({getattr(error, 'msg', 'nested too deep')})"))
            continue
        if isinstance(row, dict):
            yield line, row
        else:
            faults.append(Fault(source, f'line {line}: expected {{"file_name": ..., "text": ...}}'))


def _csv_rows(source: Path, text: str, faults: list[Fault]) -> Iterator[tuple[int, dict[str, object]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        columns = reader.fieldnames or []
        if "file_name" not in columns:
            faults.append(Fault(source, f"has no column file_name; its first line is {','.join(columns)[:80]!r}"))
            return
        for row in reader:
            if None in row:  # DictReader's place for cells beyond the header
                faults.append(
                    Fault(
                        source, f"line {reader.line_num}: more cells than columns; put captions with commas in quotes"
                    )
                )
                continue
            yield reader.line_num, row
    except csv.Error as error:
        faults.append(Fault(source, f"line {reader.line_num}: {error}"))


def _picture_of(row: dict[str, object], source: Path, known: dict[str, Path]) -> Path:
    """The picture that a row names, relative to the metadata file. Raises ValueError saying why there is none."""
    name = row.get("file_name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"file_name must be a path, got {name!r}")
    for candidate in (name, name.replace("\\", "/")):  # Windows tools write backslashes
        picture = known.get(_key(os.path.normpath(source.parent / candidate)))
        picture = picture or known.get(_key(str(source.parent / candidate)))
        if picture is not None:
            return picture
    beside = source.parent / PurePosixPath(name.replace("\\", "/")).name
    if _key(str(beside)) in known:
        raise ValueError(f'no file {name}; {beside.name} lies beside {source.name}: write "file_name": "{beside.name}"')
    if "\0" not in name and (source.parent / name).exists():
        raise ValueError(f"{name} is not a picture below the data folder ({accepted()})")
    raise ValueError(f"no file {name} (paths are relative to {source.name})")


def _texts(row: dict[str, object]) -> list[str]:
    """The captions of a row: `text` is one or a list; null, missing and blank are none."""
    text = row.get("text")
    texts = text if isinstance(text, list) else [] if text is None else [text]
    for caption in texts:
        if not isinstance(caption, str):
            raise ValueError(f"text must be a caption or a list of captions, got {caption!r:.80}")
    return [caption for caption in map(one_line, texts) if caption]


# ---- class folders, and the remarks of the summary


def _class_captions(folder: Path, paths: list[Path]) -> list[list[str]]:
    """The name of the folder that each picture lies in, in words; [] unless all lie in two or more sub-folders."""
    parents = {path.parent for path in paths}
    if len(parents) < 2 or folder in parents:
        return []
    return [[one_line(path.parent.name.replace("_", " ").replace("-", " "))] for path in paths]


def _kind(metadata: list[Path], suffix: str, rows: dict[Path, list[str]], beside: dict[Path, list[str]]) -> str:
    kinds = sorted({path.name for path in metadata}) if any(rows.values()) else []
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


def _notes(files: list[Path], paths: list[Path], captions: list[list[str]], hidden: int, suffix: str) -> list[str]:
    notes = [_unread_pictures(files)]
    if hidden:
        notes.append(f"{hidden} hidden or system files ignored")
    if not all(captions):
        misnamed = [path for path in files if path.name.lower().startswith("metadata.")]
        misnamed = [path for path in misnamed if path.name.lower() not in METADATA_NAMES and path not in paths]
        if misnamed:
            notes.append(f"{shown(misnamed[0])} is not read: a metadata file is called {' or '.join(METADATA_NAMES)}")
        for other, count in _other_suffixes(files, paths, suffix).most_common(1):
            notes.append(f"{count} files {other} have pictures' names: captions? Then set caption_extension to {other}")
    return [note for note in notes if note]
