"""Finding the pictures and captions of a folder, and saying what is wrong with them.

Three ways to keep captions are told apart by looking: a table `metadata.jsonl`, `.csv` or `.parquet` (see
unet_attn.metadata), a text file beside each picture (`dog.jpg`, `dog.txt`), and one sub-folder per class. A row of a
table goes before a text file; folder names are captions only where there are neither, nor anything that seems meant as
one of them: a file with a picture's name in another place, or a table of another name. Everything here only reads; a
fault is collected, never raised, so that one look at a folder tells everything that is wrong with it.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from unet_attn.faults import (
    CAPTION,
    FOLDER,
    MAX_CAPTION_BYTES,
    DataError,
    Fault,
    counted,
    one_line,
    read_text,
    shown,
    why,
)
from unet_attn.metadata import METADATA_NAMES, composed, metadata_captions

IMAGE_EXTENSIONS = (
    ".jpg .jpeg .jpe .jfif .png .apng .webp .gif .bmp .dib .tif .tiff .pbm .pgm .ppm .pnm .jp2 .avif".split()
)
# Pictures that a person would miss, in formats that are not read.
OTHER_PICTURES = frozenset(
    ".heic .heif .hif .svg .psd .jxl .j2k .jpx .exr .pcx .tga .ico .eps .pdf "
    ".raw .dng .cr2 .cr3 .nef .arw .raf .orf .rw2".split()
)
# Files of data sets of the `datasets` library, and what it calls them; read where no pictures lie beside them.
BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
# What cameras and other trainers keep beside a picture, under its name; no text.
COMPANIONS = frozenset(".mov .mp4 .m4v .avi .3gp .webm .wav .mp3 .aae .xmp .thm .npy .npz .pt .safetensors".split())
SYSTEM_NAMES = frozenset({"thumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin"})
RUN_CONFIG, PIPELINE_INDEX = "config.yaml", "model_index.json"  # at the root of what training leaves behind
TABLES = frozenset(Path(name).suffix for name in METADATA_NAMES)
HEAD = 4096  # bytes at the beginning of a table in which its columns are looked for
LISTED = 5  # names in a remark


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
    Raises DataError if there is no such folder, if it is that of a training run, or if there is no picture in it.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        hub = "; for a data set of the hub, set data.image_column" if len(folder.parts) == 2 else ""
        raise DataError(f"data folder {shown(folder)} {what}: 0 pictures found ({accepted()}){hub}")
    faults: list[Fault] = []
    files, ignored = walk(folder, faults)
    paths = [path for path in files if path.suffix.lower() in IMAGE_EXTENSIONS]
    _refuse_folder(folder, files, paths, ignored)

    suffix = "." + caption_extension.lstrip(".").lower()
    tables = [path for path in files if path.name.lower() in METADATA_NAMES]
    notes: list[str] = []
    rows = metadata_captions(tables, paths, faults, notes, text_column)
    beside, bad = _sidecar_captions([path for path in paths if not rows.get(path)], files, suffix, faults)
    captions = [rows.get(path) or beside.get(path) or [] for path in paths]
    kind = _kind(tables, suffix, rows, beside)
    notes += [*_notes(files, paths, captions, suffix), *ignored]
    if classes := _class_folders(folder, paths):
        if not (tables or beside or bad or _meant_as_captions(files, paths, suffix)):
            captions, kind, remarks = _class_captions(folder, paths, classes, class_template)
            notes += remarks
        elif 2 * sum(map(bool, captions)) < len(paths):
            unused = f"the names of {_listed(classes)} are not used"
            notes.append(f"{unused}: they are captions only where nothing else looks like one")
    if bad:  # a picture whose caption cannot be read goes with it
        kept = [i for i, path in enumerate(paths) if path not in bad]
        paths, captions = [paths[i] for i in kept], [captions[i] for i in kept]
    return Found(paths, paths, captions, kind, faults, notes)


def _refuse_folder(folder: Path, files: list[Path], paths: list[Path], ignored: list[str]) -> None:
    """Raise DataError for the folder of a training run, and for one without pictures."""
    if {folder / RUN_CONFIG, folder / PIPELINE_INDEX} <= set(files):
        raise DataError(
            f"data folder {shown(folder)} is that of a training run (it has {RUN_CONFIG} and {PIPELINE_INDEX}): "
            "give the folder of the pictures to train on"
        )
    if not paths:
        among = counted(len(files), "file")
        reasons = "".join(f"; {remark}" for remark in [_unread_pictures(files), *ignored] if remark)
        raise DataError(f"data folder {shown(folder)} holds 0 pictures among {among} ({accepted()}){reasons}")


def accepted() -> str:
    return "accepted: " + " ".join(IMAGE_EXTENSIONS) + ", in any folder below, any letter case"


def walk(folder: Path, faults: list[Fault]) -> tuple[list[Path], list[str]]:
    """All files below `folder`, sorted, without hidden and system files and training runs; and remarks on those."""

    def unlisted(error: OSError) -> None:
        faults.append(Fault(Path(error.filename or folder), f"cannot be listed ({error.strerror})", FOLDER))

    files, runs, hidden, hidden_folders, visited = [], [], 0, 0, set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=unlisted):
        real = os.path.realpath(parent)
        if real in visited:  # a link that leads back up
            folders.clear()
            continue
        visited.add(real)
        if Path(parent) != folder and _is_run(folders, names):
            runs.append(Path(parent))
            folders.clear()
            continue
        hidden_folders += sum(map(_is_hidden, folders))
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        hidden += sum(map(_is_hidden, names))
        files += [Path(parent, name) for name in names if not _is_hidden(name)]
    counts = [counted(hidden, "file")] * bool(hidden) + [counted(hidden_folders, "folder")] * bool(hidden_folders)
    remarks = [f"hidden or system: {' and '.join(counts)} ignored"] if counts else []
    if runs:
        listed = ", ".join(shown(run) for run in sorted(runs)[:LISTED]) + ", ..." * (len(runs) > LISTED)
        remarks.append(f"{counted(len(runs), 'training run')} ignored, with all pictures in it: {listed}")
    return sorted(files), remarks


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def _is_run(folders: list[str], names: list[str]) -> bool:
    """Whether a folder with these entries is that of a training run, whose pictures are no data."""
    return RUN_CONFIG in names and (PIPELINE_INDEX in names or bool({"checkpoints", "logs"} & set(folders)))


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


def _class_folders(folder: Path, paths: list[Path]) -> dict[Path, str]:
    """The sub-folders that pictures lie in, with their names in words; none unless there are two or more."""
    parents = sorted({path.parent for path in paths} - {folder})
    return {parent: _words(parent.name) for parent in parents} if len(parents) > 1 else {}


def _class_captions(
    folder: Path, paths: list[Path], classes: dict[Path, str], template: str
) -> tuple[list[list[str]], str, list[str]]:
    """The captions from the names of the class folders, what to call that, and remarks.

    Pictures beside the folders have none; where they are half of all or more, folder names mean something else.
    """
    loose = [path for path in paths if path.parent == folder]
    names = ", ".join(shown(Path(path.name)) for path in loose[:LISTED]) + ", ..." * (len(loose) > LISTED)
    lie = counted(len(loose), "picture lies", "pictures lie")
    if 2 * len(loose) >= len(paths):
        note = f"the names of {_listed(classes)} are no captions, as {lie} beside them ({names})"
        return [[] for _ in paths], "none", [note]
    notes = []
    if loose:
        way_out = "a picture gets one in a folder whose name is its caption"
        notes.append(f"{lie} beside the class folders, without a caption ({names}): {way_out}")
    words = [classes.get(path.parent, "") for path in paths]
    captions = [[template.replace("{}", name)] if name else [] for name in words]
    return captions, f"the names of {_listed(classes)}", notes


def _listed(classes: dict[Path, str]) -> str:
    names = list(dict.fromkeys(classes.values()))
    return f"{len(classes)} folders ({', '.join(names[:LISTED])}{', ...' if len(classes) > LISTED else ''})"


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
    known = {*IMAGE_EXTENSIONS, *OTHER_PICTURES, *COMPANIONS, suffix, ""}
    return Counter({other: count for other, count in found.items() if other.lower() not in known})


def _stray(files: list[Path], paths: list[Path], suffix: str) -> list[Path]:
    """The caption files that belong to no picture."""
    stems = {composed(str(path.with_suffix(""))) for path in paths}
    found = [path for path in files if path.name.lower().endswith(suffix) and path.name.lower() not in METADATA_NAMES]
    return [path for path in found if composed(str(path)[: -len(suffix)]) not in stems]


def _other_tables(files: list[Path], paths: list[Path], suffix: str) -> list[Path]:
    """Tables that are not read, as their names are not those of tables of captions."""
    stems = {path.with_suffix("") for path in paths}
    return [
        path
        for path in files
        if (path.suffix.lower() in TABLES - {suffix} or path.name.lower().startswith("metadata."))
        and path.name.lower() not in METADATA_NAMES
        and path.suffix.lower() not in IMAGE_EXTENSIONS
        and path.with_suffix("") not in stems  # one beside each picture: see _other_suffixes
    ]


def _meant_as_captions(files: list[Path], paths: list[Path], suffix: str) -> bool:
    """Whether captions seem to be there that are not found, in whose place names of folders must not be trained on.

    A text that has no picture's name, such as a README or a licence, is taken for none unless such texts are more than
    half as many as the pictures; a table is taken for one if it has a column file_name.
    """
    stray = _stray(files, paths, suffix)
    names = {composed(name).casefold() for path in paths for name in (path.name, path.stem)}
    return (
        bool(_other_suffixes(files, paths, suffix))
        or 2 * len(stray) > len(paths)
        or any(composed(path.name[: -len(suffix)]).casefold() in names for path in stray)
        or any(b"file_name" in _head(table) for table in _other_tables(files, paths, suffix))
    )


def _head(path: Path) -> bytes:
    """The first bytes of a file; none if it cannot be read."""
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            return b""
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError:
        return b""


def _unread_pictures(files: list[Path]) -> str:
    unread = Counter(path.suffix.lower() for path in files if path.suffix.lower() in OTHER_PICTURES)
    listed = ", ".join(f"{count} {suffix}" for suffix, count in sorted(unread.items()))
    return f"not read: {listed} (convert them to JPEG or PNG)" if listed else ""


def _unread_data_sets(files: list[Path]) -> str:
    unread = [path for path in files if path.suffix.lower() in BUILDERS and path.name.lower() not in METADATA_NAMES]
    more = f" (nor {counted(len(unread) - 1, 'other such file')})" if len(unread) > 1 else ""
    where = "a data set is read where no picture lies in its folder, or where data.path is its file"
    return f"{shown(unread[0])} is not read{more}: {where}" if unread else ""


def _notes(files: list[Path], paths: list[Path], captions: list[list[str]], suffix: str) -> list[str]:
    notes = [_unread_pictures(files), _unread_data_sets(files)]
    if not all(captions):
        if tables := [path for path in _other_tables(files, paths, suffix) if path.suffix.lower() not in BUILDERS]:
            more = f" (nor {counted(len(tables) - 1, 'other such file')})" if len(tables) > 1 else ""
            called = " or ".join(METADATA_NAMES)
            notes.append(f"{shown(tables[0])} is not read{more}: a table of captions is called {called}")
        if stray := _stray(files, paths, suffix):
            belong = counted(len(stray), f"file {suffix} belongs", f"files {suffix} belong")
            first = f", the first is {shown(stray[0])}" if len(stray) > 1 else f": {shown(stray[0])}"
            notes.append(f"{belong} to no picture{first}; the caption of NAME.png is NAME{suffix} beside it")
        for other, count in _other_suffixes(files, paths, suffix).most_common(1):
            have = counted(count, f"file {other} has a picture's name", f"files {other} have pictures' names")
            notes.append(f"{have}: captions? Then set caption_extension to {other}")
    return [note for note in notes if note]
