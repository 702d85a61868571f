"""What an earlier start found out about the same files, kept in the user's cache folder and never beside the data.

One SQLite file per data set: for each picture its size or fault, and its fitted pixels if they were kept in memory. A
row holds as long as the file's stamp does. Nothing here is ever needed: whatever goes wrong with the
cache means only that files are read again.
"""

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import PIL

CACHE_LIMIT = 4 << 30  # bytes of all cached checks together; the longest unused go first
LOCK_SECONDS = 5  # another process writes at the same time
TABLE = """
CREATE TABLE IF NOT EXISTS checked (
    name BLOB PRIMARY KEY, stamp TEXT, guard TEXT, width INTEGER, height INTEGER, kind TEXT, reason TEXT,
    settings TEXT, pixels BLOB
)
"""


class Checked(NamedTuple):
    """What reading a picture gave: (width, height), or else kind and reason of its fault; maybe its fitted pixels."""

    size: tuple[int, int]
    kind: str | None
    reason: str | None
    pixels: bytes | memoryview | None


def cache_folder() -> Path:
    """Where this project keeps what it can make again: $XDG_CACHE_HOME/unet-attn, or ~/.cache/unet-attn.

    Without a home folder a place where nothing can be written, so that nothing is kept.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base if os.path.isabs(base) else os.devnull) / "unet-attn"


def stamp(path: Path) -> str | None:
    """Length, number and times of change of a file; None if it cannot be asked.

    A file that took another's name has another number, and another time of change of itself (ctime) where the one of
    its content was set back. So a data set that was copied or restored is read again, and so is a file that was given
    another name or other rights.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino} {status.st_ctime_ns}"


class CheckCache:
    """The cached checks of one data set.

    data: what identifies the data set; guard: what decides whether a picture is usable; settings: what decides, beyond
    that, how its pixels look.
    """

    def __init__(self, data: Path, *, guard: str, settings: str) -> None:
        whole = os.path.abspath(data)
        folder = cache_folder() / "checks-1"  # the number is the format's
        # a cache folder inside the data would be a write into the user's folder
        inside = Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(whole))
        digest = hashlib.blake2b(os.fsencode(whole), digest_size=16).hexdigest()
        self.path = None if inside else folder / f"{digest}.sqlite"
        self.guard, self.settings = f"{guard}, Pillow {PIL.__version__}", settings

    def load(self, names: Sequence[str], stamps: Sequence[str | None]) -> list[Checked | None]:
        """What is known of each picture, None if nothing; pixels only where they are of the same settings."""
        found: list[Checked | None] = [None] * len(names)
        if self.path is None or not self.path.is_file():
            return found
        places = {os.fsencode(name): place for place, name in enumerate(names)}
        try:
            for name, *known, checked in self._rows():
                place = places.get(name)
                if place is not None and stamps[place] is not None and known == [stamps[place], self.guard]:
                    found[place] = checked
            os.utime(self.path)  # it was useful: keep it for longer
        except (sqlite3.Error, OSError, TypeError, ValueError) as error:
            self._discard(error)
            return [None] * len(names)
        return found

    def _rows(self) -> Iterator[tuple[bytes, str, str, Checked]]:
        with closing(sqlite3.connect(self.path, timeout=LOCK_SECONDS)) as database:
            query = (
                "SELECT name, stamp, guard, width, height, kind, reason, CASE settings WHEN ? THEN pixels END "
                "FROM checked"
            )
            for name, stamp_, guard, width, height, kind, reason, pixels in database.execute(query, (self.settings,)):
                if kind is None and not (isinstance(width, int) and isinstance(height, int) and min(width, height) > 0):
                    raise ValueError("a row without a size")
                yield name, stamp_, guard, Checked((width, height), kind, reason, pixels)

    def store(
        self, names: Sequence[str], stamps: Sequence[str | None], checks: Sequence[Checked], fresh: Sequence[int]
    ) -> None:
        """Keep the checks at the places `fresh` and forget what is not among the names. Errors are ignored."""
        if self.path is None:
            return
        rows = [
            (os.fsencode(names[at]), stamps[at], self.guard, *check.size, *check[1:3], self.settings, check.pixels)
            for at in fresh
            if stamps[at] is not None
            for check in (checks[at],)
        ]
        known = {os.fsencode(name) for name in names}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=LOCK_SECONDS)) as database, database:
                database.execute("PRAGMA synchronous = OFF")  # a cache lost in a power cut is no loss
                database.execute(TABLE)
                gone = [(name,) for (name,) in database.execute("SELECT name FROM checked") if name not in known]
                database.executemany("DELETE FROM checked WHERE name = ?", gone)
                database.executemany(f"INSERT OR REPLACE INTO checked VALUES ({', '.join('?' * 9)})", rows)
            self._prune()
        except (sqlite3.Error, OSError) as error:
            self._discard(error)

    def _discard(self, error: Exception) -> None:
        if isinstance(error, sqlite3.OperationalError):  # busy, full, read-only: not broken
            return
        with suppress(OSError):
            self.path.unlink()

    def _prune(self) -> None:
        """Remove the files longest unused until all together are below the limit."""
        files = [(path.stat().st_mtime, path.stat().st_size, path) for path in self.path.parent.glob("*.sqlite")]
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= CACHE_LIMIT or path == self.path:
                continue
            path.unlink()
            total -= size
