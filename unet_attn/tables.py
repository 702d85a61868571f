"""Data sets of the `datasets` library: saved on disk, as Parquet, Arrow or WebDataset files, or of the hub.

Pictures stay encoded until they are decoded by `load_image` as files are, so that both are read the same way.
"""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from unet_attn.cache import stamp
from unet_attn.data_options import DataOptions
from unet_attn.faults import METADATA, DataError, Fault, one_line, shown
from unet_attn.images import EMPTY, UNREADABLE, UNSUPPORTED, ImageError
from unet_attn.metadata import METADATA_NAMES, captions_of
from unet_attn.sources import BUILDERS, IMAGE_EXTENSIONS, Found, walk

if TYPE_CHECKING:  # an optional dependency, which also takes a second to import
    from datasets import Dataset, IterableDataset

SAVED = ("dataset_info.json", "dataset_dict.json")  # what `save_to_disk` leaves in its folder


def is_table(options: DataOptions) -> bool:
    """Whether `path` is for the datasets library: by what lies there, or because image_column or streaming say so."""
    path = Path(options.path)
    if options.image_column is not None or options.streaming:
        return True
    if path.is_file():
        return path.suffix.lower() in BUILDERS
    if any((path / name).is_file() for name in SAVED):
        return True
    files, _ = walk(path, [])
    suffixes = {file.suffix.lower() for file in files if file.name.lower() not in METADATA_NAMES}
    return bool(suffixes & BUILDERS.keys()) and not suffixes & set(IMAGE_EXTENSIONS)


class TablePictures:
    """The encoded pictures of a data set's column, as load_image takes them."""

    def __init__(self, table: "Dataset", column: str) -> None:
        self.table, self.column = table.select_columns([column]), column

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Path | BinaryIO:
        try:
            cell = self.table[index][self.column]
        except Exception as error:  # a damaged file of the data set: pyarrow has many errors
            raise ImageError(f"row {index}", f"cannot be read ({one_line(str(error)):.200})", UNSUPPORTED) from error
        return picture_of(cell, index)


def picture_of(cell: Any, index: int) -> Path | BinaryIO:
    """What load_image takes for a cell of encoded pictures. Raises ImageError if it holds none."""
    if isinstance(cell, dict) and cell.get("bytes"):
        return io.BytesIO(cell["bytes"])
    if isinstance(cell, dict) and cell.get("path"):
        path = Path(cell["path"])
        if not os.path.exists(path):
            raise ImageError(f"row {index}", f"the file {shown(path.absolute())} cannot be found", UNREADABLE)
        return path
    raise ImageError(f"row {index}", "the cell is empty", EMPTY)


def find_rows(options: DataOptions) -> Found:
    """The pictures and captions of a data set. Raises DataError if it cannot be opened or has no such columns."""
    table, column = open_table(options)
    if not len(table):
        raise DataError(f"data set {shown(Path(options.path))} has 0 rows in split {options.split}")
    paths = [Path(options.path, f"{options.split} row {index}") for index in range(len(table))]
    faults: list[Fault] = []
    captions, kind, notes = [[] for _ in paths], "none", []
    if options.text_column in table.column_names:
        kind = f"column {options.text_column}"
        for index, cell in enumerate(table[options.text_column]):
            try:
                captions[index] = captions_of(cell, options.text_column)
            except ValueError as error:
                faults.append(Fault(paths[index], str(error), METADATA))
    else:
        notes = [no_text_column(options, table.column_names)]
    return Found(TablePictures(table, column), paths, captions, kind, faults, notes, _stamps(table, column))


def _stamps(table: "Dataset", column: str) -> list[str | None]:
    """Of each row, from the files of the data set and the file that the row names where it holds no picture itself."""
    files = [stamp(Path(file["filename"])) for file in table.cache_files]
    if not files or None in files:
        return [None] * len(table)
    cells = table.select_columns([column]).flatten().data
    lacking, paths = (cells.column(f"{column}.bytes").is_null(), cells.column(f"{column}.path"))
    named = [
        stamp(Path(path)) if lacks and path else ""
        for lacks, path in zip(lacking.to_pylist(), paths.to_pylist(), strict=True)
    ]
    return [None if own is None else ", ".join([*files, own]) for own in named]


def no_text_column(options: DataOptions, columns: list[str]) -> str:
    return f"there is no column {options.text_column} among {', '.join(columns)}: set data.text_column"


def open_table(options: DataOptions) -> tuple["Dataset | IterableDataset", str]:
    """The data set with its pictures left encoded, and the name of the column that holds them."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise DataError(f"{options.path} needs the datasets library: pip install 'unet-attn[data]'") from None
    try:
        table = _load(options)
    except DataError:
        raise
    except Exception as error:  # it raises nearly everything, its own errors among them
        reason = one_line(str(error)) or type(error).__name__
        raise DataError(f"data set {options.path} cannot be opened: {reason:.400}") from error
    features = table.features or {}
    column = options.image_column
    if column is None:
        if options.streaming and not features and Path(options.path).is_dir():
            raise DataError(
                f"folder {options.path} is no data set that can be streamed: set data.streaming to false if it holds "
                "pictures and their captions"
            )
        having = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
        if len(having) != 1:
            what = f"{len(having)} columns of pictures" if having else "no column of pictures"
            raise DataError(f"data set {options.path} has {what}: set data.image_column to one of {_list(features)}")
        column = having[0]
    elif column not in features:
        raise DataError(f"data set {options.path} has no column {column}, only {_list(features)}")
    try:
        return table.cast_column(column, datasets.Image(decode=False)), column
    except Exception as error:
        raise DataError(f"column {column} of data set {options.path} holds {features[column]}, not pictures") from error


def _list(features: dict[str, Any]) -> str:
    return ", ".join(features) or "none"


def _load(options: DataOptions) -> "Dataset | IterableDataset":
    import datasets

    path = Path(options.path)
    if any((path / name).is_file() for name in SAVED):
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            if options.split not in saved:
                raise DataError(f"data set {path} has no split {options.split}, only {', '.join(saved)}")
            saved = saved[options.split]
        else:
            _check_split(saved, options)
        return saved.to_iterable_dataset(num_shards=1) if options.streaming else saved
    if path.is_file():
        builder = BUILDERS.get(path.suffix.lower())
        if builder is None:
            raise DataError(f"data file {path} is none of {', '.join(BUILDERS)}")
        return datasets.load_dataset(
            builder, data_files={options.split: str(path)}, split=options.split, streaming=options.streaming
        )
    return datasets.load_dataset(str(path), split=options.split, streaming=options.streaming)


def _check_split(saved: "Dataset", options: DataOptions) -> None:
    """Refuse a split that was asked for where all of a data set would be taken for it.

    `train`, which stands for no wish, takes what there is; another must be the one that the data set was saved from.
    """
    if options.split in ("train", str(saved.split)):
        return
    what = "has no splits, so no" if saved.split is None else f"is split {saved.split}, not"
    way_out = "leave data.split at train to read all of it"
    raise DataError(f"data set {options.path} {what} split {options.split}: {way_out}")
