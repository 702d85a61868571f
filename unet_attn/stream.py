"""A data set too large to fetch before training: its rows are read, checked and decoded as training goes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from unet_attn.data_options import DataOptions
from unet_attn.faults import DataError, Fault, counted, printable
from unet_attn.items import collate, decode, fitted_pixels, training_item
from unet_attn.metadata import captions_of
from unet_attn.sampler import ORDER, GlobalBatchSampler, SampleKey, derived_seed
from unet_attn.tables import no_text_column, open_table, picture_of

SHUFFLED = 1000  # rows among which the next one is drawn: a stream knows no others
LOOKED_AT = 10_000  # rows whose captions the tokenizer learns from

Row = dict[str, Any]


class StreamedImages:
    """Pictures with their captions from a streamed data set; parameters as those of CaptionedImages.

    Sample g of the run is row g of the stream, which is shuffled anew in each epoch within a buffer. So what comes when
    depends neither on the number of processes nor on a resume, which reads and passes over what was there before.
    A picture that cannot be decoded is replaced by the next of its batch. Loader processes would each get a part of the
    stream from the datasets library, so pictures are decoded by `num_workers` threads instead.
    """

    in_memory = False

    def __init__(
        self, options: DataOptions, *, channels: int = 3, seed: int = 0, require_captions: bool = True
    ) -> None:
        if channels not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (colour), got {channels}")
        self.options, self.channels, self.seed = options, channels, seed
        self.table, self.column = open_table(options)
        self.faults: list[Fault] = []
        first = list(islice(self._texts(), LOOKED_AT))
        if not first:
            raise DataError(f"data set {options.path} has 0 rows in split {options.split}")
        self.captions = [captions for captions in first if captions]
        self.looked_at, self.without_caption = len(first), first.count([])
        self.size = len(first) if len(first) < LOOKED_AT else None  # None: more than were looked at
        if require_captions and not self.captions:
            raise DataError(f"none of the first {len(first)} rows of {options.path} has a caption; {self._why()}")

    has_held_out = False

    def fingerprint(self) -> str:
        """The name of the stream: what it will hold is not known."""
        return self.options.path

    def validation_indices(self, most: int) -> list[int]:
        """None: a stream is not looked up by number, so there is no validation on it."""
        return []

    def check_batch_size(self, batch_size: int) -> None:
        """Raises DataError if there are fewer pictures than a batch takes."""
        if self.size is not None and self.size < batch_size:
            raise DataError(
                f"the data set has {counted(self.size, 'picture')}, fewer than train.batch_size {batch_size}"
            )

    def name(self, index: int) -> str:
        """What messages call sample number `index`."""
        return f"{self.options.path}, sample {index} of the stream"

    def summary(self) -> str:
        """What is known of the stream, for the start of a run: a line or two."""
        side, grey = self.options.resolution, "grey" if self.channels == 1 else "colour"
        count = counted(self.size, "picture") if self.size is not None else f"more than {LOOKED_AT} pictures"
        known = "" if self.size is not None else f", of which the tokenizer sees the first {LOOKED_AT}"
        lines = [
            f"{count} streamed from {self.options.path}, {side} x {side} {grey}, none checked before training; "
            f"captions: column {self.options.text_column}{known}"
        ]
        if self.without_caption and self.captions:
            have = "has no caption: it trains" if self.without_caption == 1 else "have no caption: they train"
            looked_at = counted(self.looked_at, "row")
            lines.append(f"{self.without_caption} of the first {looked_at} {have} the empty caption")
        return "\n".join(lines)

    def write_faults(self, path: Path) -> None:
        """Nothing was checked, so nothing was skipped."""

    def batches(
        self,
        batch_size: int,
        *,
        start_step: int = 1,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        pin_memory: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """The micro-batches of one process from a step on, for ever; see `collate`."""
        layout = GlobalBatchSampler(
            batch_size,  # the places in a step's batch are all it is asked for
            batch_size,
            self.seed,
            start_step=start_step,
            rank=rank,
            world_size=world_size,
            accumulation=accumulation,
        )
        return prefetched(self._micro_batches(layout, pin_memory=pin_memory))

    def _micro_batches(self, layout: GlobalBatchSampler, *, pin_memory: bool) -> Iterator[dict[str, Any]]:
        step = layout.start_step
        rows = self.rows((step - 1) * layout.batch_size)
        with ThreadPoolExecutor(max(1, self.options.num_workers)) as pool:
            while True:
                whole = list(islice(rows, layout.batch_size))
                first = (step - 1) * layout.batch_size
                for micro in range(layout.accumulation):
                    keys = [SampleKey(first + position, step, position) for position in layout.positions(micro)]
                    batch = collate(list(pool.map(partial(self.item, whole), keys)))
                    yield batch | {"image": batch["image"].pin_memory()} if pin_memory else batch
                step += 1

    def rows(self, skip: int) -> Iterator[Row]:
        """The rows of epoch after epoch, without the first `skip`."""
        for epoch in range(2**31):
            seed = derived_seed(self.seed, ORDER, epoch) % 2**32
            empty = True
            for row in self.table.shuffle(seed=seed, buffer_size=SHUFFLED):
                empty = False
                if skip:
                    skip -= 1
                else:
                    yield row
            if empty:
                raise DataError(f"data set {self.options.path} has no rows any more")

    def item(self, rows: list[Row], key: SampleKey) -> dict[str, Any]:
        """The training item of the row at key.position, or of the next one in the batch that can be decoded."""
        replaced = ""
        for position in chain(range(key.position, len(rows)), range(key.position)):
            row = rows[position]
            try:
                picture = picture_of(row[self.column], key.index)
                pixels = fitted_pixels(
                    decode(picture, self.options, channels=self.channels), self.options, size=self._size
                )
                captions = captions_of(row.get(self.options.text_column), self.options.text_column)
            except ValueError as error:  # of the picture (ImageError) or the captions
                replaced = replaced or printable(f"{self.name(key.index)}: {getattr(error, 'reason', error)}")
                continue
            item = training_item(pixels, self._size, captions, key, options=self.options, seed=self.seed)
            return item | {"replaced": replaced}
        raise DataError(f"{replaced}; no picture of step {key.step} can be read")

    @property
    def _size(self) -> tuple[int, int]:
        return self.options.resolution, self.options.resolution

    def _texts(self) -> Iterator[list[str] | None]:
        """The captions of one row after the other; None for what is no caption, which comes out in training."""
        column = self.options.text_column
        if self.table.column_names is not None and column in self.table.column_names:
            for row in self.table.select_columns([column]):
                try:
                    yield captions_of(row[column], column)
                except ValueError:
                    yield None
        else:
            yield from ([] for _ in self.table)

    def _why(self) -> str:
        columns, column = self.table.column_names or [], self.options.text_column
        if column in columns:
            return f"column {column} holds none there: set data.text_column to the one with the captions"
        return no_text_column(self.options, columns)


def prefetched(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same batches, each made by a thread while the one before it is in use."""
    with ThreadPoolExecutor(1) as maker:
        ahead = maker.submit(next, batches)
        while True:
            batch = ahead.result()
            ahead = maker.submit(next, batches)
            yield batch
