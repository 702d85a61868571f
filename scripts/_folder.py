"""What the scripts share: a data folder that is complete or absent, and places that are refused before the work.

Whether a place can be written is tried rather than asked of its permissions, which say nothing of a full or read-only
disk, nor anything to the administrator.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_file(path: Path, option: str) -> None:
    """Raise ValueError, naming the option, if no file can be written at `path`. Nothing is left there."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: give the file's name too")
    if path.exists() and not path.is_file():
        return  # /dev/stdout and its like
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")
    _try_to_write(path.parent, f"{option} {path}")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option} {path} may not be written")


def check_folder(folder: Path, option: str) -> None:
    """Raise ValueError, naming the option, if `folder` can neither be made nor written into. Nothing is left there."""
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        which = "" if nearest == folder else f" cannot be made: {nearest}"
        raise ValueError(f"{option} {folder}{which} is a file, and must be a folder")
    _try_to_write(nearest, f"{option} {folder}")


def _try_to_write(folder: Path, what: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{what} cannot be written ({error.strerror})") from None


def refuse_filled(out: Path) -> None:
    """Raise ValueError if `out` already holds something: nothing is ever overwritten."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already exists and is not an empty folder; give another --out, or remove it first")


@contextmanager
def fresh_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that becomes `out` when the block ends without an exception, and vanishes otherwise.

    Raises ValueError if `out` already holds something.
    """
    refuse_filled(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        yield partial
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o777 & ~umask)  # mkdtemp makes private folders; this one is for the user's other tools too
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_metadata(folder: Path, rows: list[dict[str, str | list[str]]]) -> None:
    """Write metadata.jsonl: one {"file_name": ..., "text": ...} per line, paths relative to `folder`."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
