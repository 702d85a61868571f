"""Data sets of the datasets library: saved, as Parquet files, by hub id; whole and streamed."""

import io
import pickle
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from PIL import Image

from unet_attn.data import CaptionedImages, DataError, DataOptions, open_data
from unet_attn.stream import StreamedImages

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library sleeps for ten seconds at the end of each streamed epoch of Parquet files."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)


def encoded(value: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (13 + value % 3, 11), value).save(buffer, kind)
    return buffer.getvalue()


def rows(count: int = 7) -> "datasets.Dataset":
    """Grey pictures of increasing value; captions are text, lists and nothing."""
    return datasets.Dataset.from_dict(
        {
            "n": list(range(count)),
            "image": [{"bytes": encoded(20 * i), "path": None} for i in range(count)],
            "text": [f"number {i}" if i != 1 else None for i in range(count)],
            "several": [[f"{i} a", f"{i} b"] for i in range(count)],
        },
        features=datasets.Features(
            {
                "n": datasets.Value("int64"),
                "image": datasets.Image(),
                "text": datasets.Value("string"),
                "several": datasets.List(datasets.Value("string")),
            }
        ),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    rows().save_to_disk(folder / "one")
    datasets.DatasetDict({"train": rows(), "test": rows(3)}).save_to_disk(folder / "splits")
    (folder / "files/data").mkdir(parents=True)
    rows().to_parquet(folder / "files/data/train-00000-of-00001.parquet")
    return folder


def images_in(path: Path, **options: object) -> CaptionedImages:
    return open_data(DataOptions(path=str(path), resolution=11, caption_dropout=0.0, **options), channels=1)


@pytest.mark.parametrize("name", ["one", "splits", "files", "files/data/train-00000-of-00001.parquet"])
def test_a_data_set_is_recognised_and_read_like_files(saved: Path, name: str) -> None:
    for _ in range(2):  # decoded, and from the cache
        images = images_in(saved / name)
        assert len(images) == 7 and images.kind == "column text" and images.in_memory
        assert images.captions[:3] == [["number 0"], [], ["number 2"]]
        torch.testing.assert_close(images[3]["image"], torch.full((1, 11, 11), 60 / 127.5 - 1))
        assert images.image_sizes[:3] == [(13, 11), (15, 11), (14, 11)]
    assert pickle.loads(pickle.dumps(images))[3]["caption"] == "number 3"
    assert "captions: column text" in images.summary()


def test_columns_and_splits_are_chosen_by_name(saved: Path) -> None:
    images = images_in(saved / "splits", split="test", text_column="several", image_column="image")
    assert images.captions == [["0 a", "0 b"], ["1 a", "1 b"], ["2 a", "2 b"]]
    assert images.name(2) == str(saved / "splits" / "test row 2")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("splits", {"split": "dev"}, "no split dev, only train, test"),
        ("files", {"split": "dev"}, "cannot be opened: Unknown split"),
        ("one", {"image_column": "picture"}, "no column picture, only n, image, text, several"),
        ("one", {"image_column": "n"}, r"column n of data set .* not pictures"),
        ("one", {"text_column": "caption"}, r"no column caption among n, image, text, several: set data\.text_column"),
        ("gone", {"image_column": "image"}, "gone cannot be opened"),
        ("gone", {}, "gone does not exist: 0 pictures found"),
    ],
)
def test_what_is_missing_is_named_with_what_there_is(
    saved: Path, name: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        images_in(saved / name, **options)


def test_a_split_of_a_data_set_without_splits_is_refused_unless_it_is_the_one(saved: Path, tmp_path: Path) -> None:
    for streaming in (False, True):
        with pytest.raises(DataError, match=r"one has no splits, so no split validation: leave data\.split at train"):
            images_in(saved / "one", split="validation", streaming=streaming)
    files = {"validation": str(saved / "files/data/train-00000-of-00001.parquet")}
    datasets.load_dataset("parquet", data_files=files, split="validation").save_to_disk(tmp_path / "part")
    assert len(images_in(tmp_path / "part", split="validation")) == len(images_in(tmp_path / "part")) == 7
    with pytest.raises(DataError, match=r"part is split validation, not split test: leave data\.split at train"):
        images_in(tmp_path / "part", split="test")


def test_a_hub_id_is_asked_of_the_hub_once_the_column_is_named() -> None:
    # tests have no network, which the message tells
    with pytest.raises(DataError, match="data set someone/pictures cannot be opened: Couldn't reach"):
        open_data(DataOptions(path="someone/pictures", image_column="image"))


def test_a_column_must_be_chosen_among_several_of_pictures(tmp_path: Path) -> None:
    rows().add_column("mask", [{"bytes": encoded(5), "path": None}] * 7).cast_column(
        "mask", datasets.Image()
    ).save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match=r"2 columns of pictures: set data\.image_column"):
        images_in(tmp_path / "two")
    for _ in range(2):  # the second time from the cache
        for column, value in (("image", 20), ("mask", 5)):
            images = images_in(tmp_path / "two", image_column=column)
            torch.testing.assert_close(images[1]["image"], torch.full((1, 11, 11), value / 127.5 - 1))


def test_a_picture_that_a_row_names_is_read_again_once_it_changed_and_named_where_it_is_not(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for path in paths:
        path.write_bytes(encoded(20))
    table = datasets.Dataset.from_dict({"image": list(map(str, paths)), "text": ["one", "two"]})
    table.save_to_disk(tmp_path / "named")
    assert len(images_in(tmp_path / "named", image_column="image")) == 2
    paths[1].write_bytes(encoded(200))
    images = images_in(tmp_path / "named", image_column="image")
    torch.testing.assert_close(images[1]["image"], torch.full((1, 11, 11), 200 / 127.5 - 1))
    paths[0].unlink()
    with pytest.raises(DataError, match=rf"train row 0: the file {paths[0]} cannot be found"):
        images_in(tmp_path / "named", image_column="image")


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    cells = [{"bytes": encoded(20 * i), "path": None} for i in range(7)]
    cells[2]["bytes"] = cells[2]["bytes"][:40]
    cells[5] = None
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    table = datasets.Dataset.from_dict({"image": cells, "text": [f"number {i}" for i in range(7)]}, features=features)
    table.save_to_disk(tmp_path / "damaged")
    return tmp_path / "damaged"


def test_damaged_and_empty_cells_are_faults_with_their_rows(damaged: Path) -> None:
    with pytest.raises(DataError, match="2 faults") as error:
        images_in(damaged)
    assert "train row 2: is damaged at its beginning" in str(error.value)
    assert "train row 5: the cell is empty" in str(error.value)
    images = images_in(damaged, on_error="skip")
    assert [caption for (caption,) in images.captions] == [f"number {i}" for i in (0, 1, 3, 4, 6)]


def test_without_the_library_the_message_names_what_to_install(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the datasets library: pip install 'unet-attn\[data\]'"):
        images_in(saved / "one")


# streaming


def drawn(images: StreamedImages, batches: int, **place: int) -> list[tuple[int, str]]:
    whole = list(islice(images.batches(3, **place), batches))
    return [(key.step, caption) for batch in whole for key, caption in zip(batch["key"], batch["caption"], strict=True)]


@pytest.mark.parametrize("name", ["one", "files"])
def test_a_stream_gives_every_row_once_an_epoch_and_resumes_anywhere(saved: Path, name: str) -> None:
    images = images_in(saved / name, streaming=True, text_column="several")
    assert isinstance(images, StreamedImages) and images.size == 7
    straight = drawn(images, 7)
    first_epoch = [caption.split()[0] for _, caption in straight[:7]]
    assert sorted(first_epoch) == [str(i) for i in range(7)]
    assert [caption.split()[0] for _, caption in straight[7:14]] != first_epoch
    assert drawn(images, 4, start_step=4) == straight[9:]


def test_a_stream_does_not_depend_on_workers_processes_or_micro_batches(saved: Path) -> None:
    images = images_in(saved / "one", streaming=True, text_column="several")
    straight = drawn(images, 4)
    assert drawn(images_in(saved / "one", streaming=True, text_column="several", num_workers=2), 4) == straight
    shared = [drawn(images, 4, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(sample for part in shared for sample in part) == sorted(straight)
    assert drawn(images, 12, accumulation=3) == straight


def test_the_pictures_of_a_stream_are_decoded_as_files_are(saved: Path) -> None:
    (batch,) = islice(images_in(saved / "one", streaming=True).batches(7), 1)
    values = sorted(round((image[0, 0, 0].item() + 1) * 127.5) for image in batch["image"])
    assert batch["image"].shape == (7, 1, 11, 11) and values == [20 * i for i in range(7)]


def test_what_cannot_be_decoded_in_a_stream_is_replaced_and_reported(damaged: Path) -> None:
    images = images_in(damaged, streaming=True)
    batches = [list(islice(images.batches(7), 2)) for _ in range(2)]
    for batch in batches[0]:
        assert batch["image"].shape == (7, 1, 11, 11) and len(batch["replaced"]) == 2
        assert any("of the stream: the cell is empty" in message for message in batch["replaced"])
    assert [batch["caption"] for batch in batches[0]] == [batch["caption"] for batch in batches[1]]


def test_a_stream_says_what_it_is_and_refuses_what_it_cannot_do(saved: Path, tmp_path: Path) -> None:
    images = images_in(saved / "one", streaming=True)
    assert images.summary().startswith("7 pictures streamed from")
    assert images.captions == [[f"number {i}"] for i in (0, 2, 3, 4, 5, 6)]
    assert images.summary().endswith("\n1 of the first 7 rows has no caption: it trains the empty caption")
    assert "no caption" not in images_in(saved / "one", streaming=True, text_column="several").summary()
    with pytest.raises(DataError, match=r"7 pictures, fewer than train.batch_size 8"):
        images.check_batch_size(8)
    with pytest.raises(DataError, match=r"none of the first 7 rows .* no column caption"):
        images_in(saved / "one", streaming=True, text_column="caption")
    with pytest.raises(DataError, match=r"none of the first 7 rows .* has a caption; column n holds none there: set"):
        images_in(saved / "one", streaming=True, text_column="n")
    empty = rows().remove_columns("text").add_column("text", [None, " "] + [None] * 5)
    empty.save_to_disk(tmp_path / "empty")
    with pytest.raises(DataError, match=r"none of the first 7 rows .*; column text holds none there: set data\.text"):
        images_in(tmp_path / "empty", streaming=True)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(encoded(20))
    (tmp_path / "pictures/a.txt").write_text("one")
    with pytest.raises(DataError, match=r"pictures is no data set that can be streamed: set data\.streaming to false"):
        images_in(tmp_path / "pictures", streaming=True)
    with pytest.raises(ValueError, match=r"data\.buckets needs the shape"):
        DataOptions(path="x", streaming=True, buckets=True)
