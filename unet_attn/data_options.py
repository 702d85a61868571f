"""What a person can choose about their pictures and captions: the keys of a configuration's `data` section."""

from dataclasses import dataclass
from typing import Literal

from unet_attn.images import Crop, background_colour


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where pictures and captions are, and what becomes of them.

    Args:
        path: a folder (sub-folders are searched), a data set saved by the datasets library, a Parquet, Arrow or
            WebDataset file or a folder of them, or, with image_column, the id of a data set of the hub.
        resolution: side of the square pictures in pixels; with buckets, of the square of the same area.
        buckets: keep pictures nearly whole in batches of several shapes, instead of cutting squares out of them.
        crop: what is cut out of a picture that has not the wanted shape: its middle, or a random place at each visit.
        horizontal_flip: mirror half of the visits; wrong for writing and for left and right.
        background: the colour behind transparent pixels.
        caption_dropout: probability that a visit has the empty caption, which guidance needs; in [0, 1].
        caption_extension: of the text files beside pictures, with or without the dot.
        class_template: the caption of a picture in a class folder, "{}" standing for the folder's name.
        text_column: of tables (metadata.jsonl, .csv, .parquet) and data sets, a caption or a list of them.
        image_column: of a data set; null = the only one that holds pictures.
        split: of a data set.
        validation_share: part of the pictures that is never trained on, for validation; in [0, 1).
        streaming: read a data set while training instead of fetching and checking all of it before.
        on_error: fail lists every file that cannot be used and stops, skip leaves those out.
        num_workers: loader processes for sets too large for memory; as many threads check the files (at least up to 4).
        max_pixels: refuse larger pictures; null is Pillow's limit against decompression bombs.
    """

    path: str
    resolution: int = 32
    buckets: bool = False
    crop: Crop = "center"
    horizontal_flip: bool = False
    background: str = "white"
    caption_dropout: float = 0.1
    caption_extension: str = ".txt"
    class_template: str = "{}"
    text_column: str = "text"
    image_column: str | None = None
    split: str = "train"
    validation_share: float = 0.0
    streaming: bool = False
    on_error: Literal["fail", "skip"] = "fail"
    num_workers: int = 0
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("data.path must be a folder or a data set, got ''")
        if self.resolution < 1:
            raise ValueError(f"data.resolution must be at least 1, got {self.resolution}")
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"data.caption_dropout must be in [0, 1], got {self.caption_dropout}")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"data.validation_share must be at least 0 and below 1, got {self.validation_share}")
        if self.streaming and self.validation_share:
            raise ValueError("data.streaming cannot hold pictures out: set data.validation_share to 0")
        for name, value, known in (
            ("crop", self.crop, ("center", "random")),
            ("on_error", self.on_error, ("fail", "skip")),
        ):
            if value not in known:
                raise ValueError(f"data.{name} must be {' or '.join(known)}, got {value!r}")
        if self.num_workers < 0:
            raise ValueError(f"data.num_workers must be at least 0, got {self.num_workers}")
        if self.max_pixels is not None and self.max_pixels < 1:
            raise ValueError(f"data.max_pixels must be at least 1, got {self.max_pixels}")
        if self.class_template.count("{}") != 1:
            raise ValueError(f'data.class_template must hold "{{}}" once, got {self.class_template!r}')
        if not self.caption_extension.strip("."):
            raise ValueError(f"data.caption_extension must be like .txt, got {self.caption_extension!r}")
        if self.streaming and self.buckets:
            raise ValueError("data.buckets needs the shape of every picture, which data.streaming does not know")
        try:
            background_colour(self.background)
        except ValueError as error:
            raise ValueError(f"data.{error}") from None
