"""Features of real pictures from earlier evaluations, kept by content in the user's cache folder.

One SQLite file with a row for each picture and network: the key is a digest of the network, its weights and the
picture's pixels, so that a picture that changed, or another network, has another row. Nothing here is ever needed:
whatever goes wrong with the file means only that features are computed again.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unet_attn.cache import cache_folder
from unet_attn.extractors import BATCH_SIZE, Extractor, device_of, extract_features, weights_digest

MOST_ROWS = 100_000  # half a gigabyte of EfficientNet's features; the oldest go first
CHUNK = 256
LOCK_SECONDS = 5  # another process writes at the same time
TABLE = "CREATE TABLE IF NOT EXISTS features (key BLOB PRIMARY KEY, value BLOB)"


def cached_features(
    pictures: Iterable[Tensor],
    extractor: Extractor,
    *,
    batch_size: int = BATCH_SIZE,
    chunk: int = CHUNK,
    most_rows: int = MOST_ROWS,
) -> Tensor:
    """As extract_features, but what an earlier call computed of the same pixels is taken from the cache.

    chunk: so many pictures are held in memory at a time; most_rows: so many features are kept for later.
    """
    # another kind of device computes other last digits
    about = (extractor.name, weights_digest(extractor.network), device_of(extractor.network).type)
    path = cache_folder() / "features-1.sqlite"  # the number is the format's
    remaining = iter(pictures)
    features = []
    while some := list(islice(remaining, chunk)):
        keys = _keys(some, repr(about))
        known = _load(path, keys)
        missing = [at for at, key in enumerate(keys) if key not in known]
        if missing:
            computed = extract_features((some[at] for at in missing), extractor.network, batch_size=batch_size)
            fresh = {keys[at]: row.numpy() for at, row in zip(missing, computed, strict=True)}
            _store(path, fresh, most_rows)
            known |= fresh
        features += [known[key] for key in keys]
    if not features:
        raise ValueError("there are no pictures to extract features from")
    return torch.from_numpy(np.stack(features))


def _keys(pictures: Sequence[Tensor], about: str) -> list[bytes]:
    network = hashlib.blake2b(about.encode(), digest_size=16)
    keys = []
    for picture in pictures:
        key = network.copy()
        key.update(repr((tuple(picture.shape), picture.dtype)).encode())
        key.update(picture.contiguous().numpy())
        keys.append(key.digest())
    return keys


def _load(path: Path, keys: Sequence[bytes]) -> dict[bytes, np.ndarray]:
    """The rows that are there; none if the file is damaged."""
    if not path.is_file():
        return {}
    found: dict[bytes, np.ndarray] = {}
    try:
        with closing(sqlite3.connect(path, timeout=LOCK_SECONDS)) as database:
            for key in keys:
                row = database.execute("SELECT value FROM features WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    found[key] = _believed(row[0])
    except (sqlite3.Error, ValueError) as error:
        _discard(path, error)
        return {}
    return found


def _believed(value: object) -> np.ndarray:
    """Features out of their bytes, which end in a checksum: a flipped bit would be a wrong figure.

    Raises ValueError if they are not what was written.
    """
    if not isinstance(value, bytes) or _checksum(value[:-8]) != value[-8:]:
        raise ValueError("a damaged row")
    return np.frombuffer(value[:-8], np.float32)


def _checksum(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=8).digest()


def _store(path: Path, rows: dict[bytes, np.ndarray], most_rows: int) -> None:
    """Keep the rows, and of all the newest `most_rows`. Errors are ignored."""
    values = [(key, row.tobytes() + _checksum(row.tobytes())) for key, row in rows.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=LOCK_SECONDS)) as database, database:
            database.execute("PRAGMA synchronous = OFF")  # a cache lost in a power cut is no loss
            database.execute(TABLE)
            database.executemany("INSERT OR REPLACE INTO features VALUES (?, ?)", values)
            database.execute("DELETE FROM features WHERE rowid <= (SELECT max(rowid) FROM features) - ?", (most_rows,))
    except (sqlite3.Error, OSError) as error:
        _discard(path, error)


def _discard(path: Path, error: Exception) -> None:
    if isinstance(error, sqlite3.OperationalError):  # busy, full, read-only: not broken
        return
    with suppress(OSError):
        path.unlink()
