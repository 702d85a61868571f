"""What the prepare_*.py scripts share: a data folder that is complete or absent."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
