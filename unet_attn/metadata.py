"""Captions from tables beside the pictures: metadata.jsonl, metadata.csv, metadata.parquet.

Column `file_name` is a path relative to the table, the text column (`text` unless told) one caption or a list of them.
What is wrong with a row is collected with its line and never raised.
"""

import csv
import io
import json
import os
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path, PurePosixPath

from unet_attn.faults import METADATA, DataError, Fault, counted, one_line, read_text, shown, why

METADATA_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
MAX_METADATA_BYTES = 1 << 30  # of a text table, which is read whole

Row = tuple[str, dict[str, object]]  # where it stands, for messages ("line 3"), and its cells


def metadata_captions(
    tables: list[Path], pictures: list[Path], faults: list[Fault], notes: list[str], text_column: str
) -> dict[Path, list[str]]:
    """The captions by picture of all tables; several rows of one picture are several captions of it."""
    known = {_plain(path): path for path in pictures}
    found: dict[Path, list[str]] = {}
    for table in tables:
        rows, without_text = 0, 0
        for where, row in _rows(table, faults, notes, text_column):
            rows += 1
            without_text += text_column not in row
            try:
                picture = _picture_of(row, table, known)
                found.setdefault(picture, []).extend(captions_of(row.get(text_column), text_column))
            except ValueError as error:
                faults.append(Fault(table, f"{where}: {error}", METADATA))
        if rows and rows == without_text:
            notes.append(f"{shown(table)} has no column {text_column}: set text_column to the one with the captions")
    return found


def captions_of(value: object, column: str) -> list[str]:
    """The captions in a cell, which holds one or a list; null and blank are none. Raises ValueError otherwise."""
    texts = value if isinstance(value, list) else [] if value is None else [value]
    for caption in texts:
        if not isinstance(caption, str):
            raise ValueError(f"{column} must be a caption or a list of captions, got {caption!r:.80}")
        if not caption.isascii() and any("\ud800" <= letter <= "\udfff" for letter in caption):
            raise ValueError(f"{column} has half a character (a lone surrogate): {caption!r:.80}")
    return [caption for caption in map(one_line, texts) if caption]


def composed(text: str) -> str:
    """Names are compared composed: macOS writes "é" as two characters, most other systems as one."""
    return unicodedata.normalize("NFC", text)


def _rows(table: Path, faults: list[Fault], notes: list[str], text_column: str) -> Iterator[Row]:
    """Yield the rows of a table; what cannot be parsed becomes a fault."""
    if table.suffix.lower() == ".parquet":
        yield from _parquet_rows(table, faults, text_column)
        return
    try:
        if not table.is_file() or table.stat().st_size > MAX_METADATA_BYTES:
            raise ValueError(f"is not a regular file of at most {MAX_METADATA_BYTES >> 20} MiB")
        text = read_text(table)
    except (ValueError, OSError) as error:
        faults.append(Fault(table, why(error), METADATA))
        return
    if table.suffix.lower() == ".csv":
        yield from _csv_rows(table, text, faults, text_column)
    else:
        yield from _json_rows(table, text, faults, notes)


def _json_rows(table: Path, text: str, faults: list[Fault], notes: list[str]) -> Iterator[Row]:
    lines = text.rstrip().split("\n")  # nothing else ends a row: JSON strings may hold other line separators
    blank = [number for number, content in enumerate(lines, start=1) if not content.strip()]
    if blank:
        notes.append(f"{shown(table)}: {counted(len(blank), 'blank line')} ignored, the first is line {blank[0]}")
    for line, content in enumerate(lines, start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content, object_pairs_hook=_row)
        except RecursionError:
            faults.append(Fault(table, f"line {line}: broken JSON (nested too deep)", METADATA))
            continue
        except ValueError as error:
            faults.append(Fault(table, f"line {line}: broken JSON ({getattr(error, 'msg', error)})", METADATA))
            continue
        if isinstance(row, dict):
            yield f"line {line}", row
        else:
            faults.append(Fault(table, f'line {line}: expected {{"file_name": ..., "text": ...}}', METADATA))


def _row(cells: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object. Raises ValueError for a name that stands twice, of which json alone would keep the last."""
    row = dict(cells)
    if len(row) < len(cells):
        raise ValueError(_twice([name for name, _ in cells]))
    return row


def _twice(columns: Sequence[str]) -> str:
    """Says which of the columns stands more than once, and is empty if none does."""
    several = [name for name in dict.fromkeys(columns) if columns.count(name) > 1]
    return f"{several[0]} stands {columns.count(several[0])} times" if several else ""


def _csv_rows(table: Path, text: str, faults: list[Fault], text_column: str) -> Iterator[Row]:
    # strict: a quote that is never closed is an error, where it would swallow the rows that follow
    reader, line = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True), 1
    try:
        columns = [name.strip() for name in next(reader, [])]
        if "file_name" not in columns:
            first = ",".join(columns)[:80]
            faults.append(Fault(table, f"has no column file_name; its first line is {first!r}", METADATA))
            return
        if twice := _twice([name for name in columns if name in ("file_name", text_column)]):
            faults.append(Fault(table, f"column {twice} in its first line: which one is meant?", METADATA))
            return
        line = reader.line_num + 1  # in which a row begins: the reader tells where it ends, or where an error came out
        for cells in reader:
            if len(cells) > len(columns):
                reason = f"line {line}: more cells than columns; put captions with commas in quotes"
                faults.append(Fault(table, reason, METADATA))
            elif cells:  # none in a blank line
                yield f"line {line}", dict(zip_longest(columns, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        faults.append(Fault(table, f"line {line}: {error}", METADATA))


def _parquet_rows(table: Path, faults: list[Fault], text_column: str) -> Iterator[Row]:
    """Raises DataError if pyarrow, which reads Parquet, is not installed."""
    try:
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise DataError(f"{shown(table)} needs pyarrow: pip install 'unet-attn[data]'") from None
    number = 0
    try:
        with ParquetFile(table) as file:
            columns = [name for name in file.schema_arrow.names if name in ("file_name", text_column)]
            if "file_name" not in columns:
                has = ", ".join(file.schema_arrow.names)[:80]
                faults.append(Fault(table, f"has no column file_name, only {has}", METADATA))
                return
            if twice := _twice(columns):
                faults.append(Fault(table, f"column {twice}: which one is meant?", METADATA))
                return
            for batch in file.iter_batches(batch_size=4096, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except Exception as error:  # pyarrow raises its own errors, OSError, ValueError and more on damaged files
        text = one_line(why(error)) or type(error).__name__
        faults.append(Fault(table, f"cannot be read after row {number} ({text:.200})", METADATA))


def _picture_of(row: dict[str, object], table: Path, known: dict[str, Path]) -> Path:
    """The picture that a row names, relative to the table. Raises ValueError saying why there is none."""
    name = row.get("file_name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"file_name must be a path, got {name!r:.80}")
    for candidate in (name, name.replace("\\", "/")):  # Windows tools write backslashes
        if (picture := known.get(_plain(table.parent / candidate))) is not None:
            return picture
    short = name if len(name) <= 200 else f"{name[:200]}..."
    beside = table.parent / PurePosixPath(name.replace("\\", "/")).name
    if _plain(beside) in known:
        raise ValueError(f'no file {short}; {beside.name} lies beside {table.name}: write "file_name": "{beside.name}"')
    if _exists(table.parent, name):
        raise ValueError(f"{short} is not a picture below the data folder")
    raise ValueError(f"no file {short} (paths are relative to {table.name})")


def _plain(path: Path) -> str:
    """A path by which pictures are found: the same whether a row or the data folder goes there by way of another."""
    return composed(os.path.normpath(path))


def _exists(folder: Path, name: str) -> bool:
    try:
        return (folder / name).exists()
    except (ValueError, OSError):  # zero bytes, half characters, a name that is too long
        return False
