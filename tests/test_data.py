"""A folder as a data set: values, faults, captions, and the repeatability of every random choice."""

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from unet_attn import data
from unet_attn.data import CaptionedImages, DataError, DataOptions, ReplacedPictures, collate
from unet_attn.sampler import GlobalBatchSampler, SampleKey


def open_images(
    folder: Path,
    resolution: int = 32,
    channels: int = 3,
    *,
    seed: int = 0,
    require_captions: bool = True,
    multiple_of: int = 1,
    **options: object,
) -> CaptionedImages:
    return CaptionedImages(
        DataOptions(path=str(folder), resolution=resolution, **options),
        channels=channels,
        seed=seed,
        require_captions=require_captions,
        multiple_of=multiple_of,
    )


def noise_jpeg(path: Path, seed: int = 0) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (37, 41, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, "JPEG")


def captioned(folder: Path, count: int, size: tuple[int, int] = (11, 11)) -> Path:
    """`count` grey pictures of increasing value, each with a caption in a text file."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        Image.new("L", size, 10 * i).save(folder / f"{i:03d}.png")
        (folder / f"{i:03d}.txt").write_text(f"number {i}")
    return folder


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_of_mixed_modes_gives_batches_of_the_models_channels(tmp_path: Path, channels: int) -> None:
    for i in range(2):
        Image.new("L", (32, 32), 200).save(tmp_path / f"l{i}.png")
        Image.new("LA", (32, 32), (200, 255)).save(tmp_path / f"la{i}.png")
        Image.new("1", (32, 32), 1).save(tmp_path / f"one{i}.png")
        Image.new("RGB", (32, 32), (0, 0, 0)).save(tmp_path / f"rgb{i}.png")
    images = open_images(tmp_path, 32, channels, require_captions=False)
    loader = DataLoader(images, batch_size=4, collate_fn=collate)
    batches = [batch["image"] for batch in loader]
    assert [tuple(batch.shape) for batch in batches] == [(4, channels, 32, 32)] * 2
    assert all(batch.dtype == torch.float32 for batch in batches)
    by_name = {path.stem: images[i]["image"] for i, path in enumerate(images.paths)}
    torch.testing.assert_close(by_name["l0"], torch.full((channels, 32, 32), 200 / 127.5 - 1))
    assert torch.equal(by_name["one0"], torch.ones(channels, 32, 32))
    assert torch.equal(by_name["rgb0"], -torch.ones(channels, 32, 32))


def test_transparent_pixels_train_the_background_of_the_option(tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (0, 255, 0, 0)).save(tmp_path / "a.png")
    white = open_images(tmp_path, 8, require_captions=False)[0]["image"]
    black = open_images(tmp_path, 8, require_captions=False, background="black")[0]["image"]
    assert torch.equal(white, torch.ones(3, 8, 8)) and torch.equal(black, -torch.ones(3, 8, 8))


def damaged_folder(folder: Path) -> Path:
    """Seven good photos, one cut to 60 %, and three files that are no pictures."""
    for i in range(7):
        noise_jpeg(folder / f"good{i}.jpg", i)
    noise_jpeg(folder / "cut.jpg", 8)
    (folder / "cut.jpg").write_bytes(
        (folder / "cut.jpg").read_bytes()[: int(0.6 * (folder / "cut.jpg").stat().st_size)]
    )
    (folder / "b.png").write_bytes(b"")
    (folder / "c.jpg").write_text("just text")
    (folder / "d.webp").write_text("<html><body>404 not found</body></html>")
    return folder


@pytest.mark.parametrize("num_workers", [0, 2])
def test_all_unreadable_files_are_named_together_with_their_reasons(tmp_path: Path, num_workers: int) -> None:
    damaged_folder(tmp_path)
    with pytest.raises(DataError) as error:
        open_images(tmp_path, 13, require_captions=False, num_workers=num_workers)
    first, *rest = str(error.value).splitlines()
    assert first.startswith(f"4 faults in {tmp_path} (on_error: skip would train on 7 pictures)")
    assert [line.split(":")[0].strip() for line in rest] == [
        str(tmp_path / n) for n in ("b.png", "c.jpg", "cut.jpg", "d.webp")
    ]
    assert "empty" in rest[0] and "truncated" in rest[2]


def test_skip_trains_on_the_rest_and_says_what_was_skipped(tmp_path: Path) -> None:
    for i in range(7):
        noise_jpeg(tmp_path / f"good{i}.jpg", i)
    noise_jpeg(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:900])
    images = open_images(tmp_path, 13, require_captions=False, on_error="skip")
    assert len(images) == 7 and [fault.path.name for fault in images.faults] == ["cut.jpg"]
    assert f"1 skipped: {tmp_path / 'cut.jpg'} (" in images.summary()
    assert all("good" in path.name for path in images.paths)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_folder_of_bad_files_only_is_an_error_that_lists_them(tmp_path: Path, on_error: str) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "b.jpg").write_text("text")
    with pytest.raises(DataError, match="no usable picture") as error:
        open_images(tmp_path, require_captions=False, on_error=on_error)
    assert "a.png" in str(error.value) and "b.jpg" in str(error.value)


def test_faults_of_pictures_captions_and_metadata_come_in_one_report(tmp_path: Path) -> None:
    captioned(tmp_path, 5)
    (tmp_path / "001.txt").write_bytes(b"a cat\x92s hat")
    (tmp_path / "002.png").write_bytes(b"")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "gone.png", "text": "x"}\n')
    with pytest.raises(DataError) as error:
        open_images(tmp_path, 11)
    text = str(error.value)
    assert text.startswith("3 faults")
    assert "gone.png" in text and "byte 5" in text and "002.png: the file is empty" in text
    images = open_images(tmp_path, 11, on_error="skip")
    assert images.captions == [["number 0"], ["number 3"], ["number 4"]]


def test_missing_captions_are_counted_and_none_at_all_is_an_error(tmp_path: Path) -> None:
    captioned(tmp_path, 4)
    with_dot, without = (open_images(tmp_path, 11, caption_extension=e) for e in (".txt", "txt"))
    assert with_dot.captions == without.captions == [[f"number {i}"] for i in range(4)]
    assert "no caption" not in with_dot.summary()
    (tmp_path / "000.txt").unlink()
    (tmp_path / "003.txt").write_text(" \n")
    images = open_images(tmp_path, 11)
    assert "2 of 4 images have no caption" in images.summary()
    assert images[0]["caption"] == "" and images[1]["caption"] == "number 1"
    (tmp_path / "001.txt").unlink()
    (tmp_path / "002.txt").rename(tmp_path / "002.caption")
    with pytest.raises(DataError, match=r"none of the 4 images .* NAME\.txt .*set caption_extension to \.caption"):
        open_images(tmp_path, 11)
    assert not any(open_images(tmp_path, 11, require_captions=False).captions)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "gone", "text": "x"}\n' * 5)
    with pytest.raises(DataError, match=r"none of the 4 images .*jsonl: line 1: no file gone .*; and 2 more faults$"):
        open_images(tmp_path, 11, on_error="skip")


def test_no_file_of_the_user_is_written(tmp_path: Path) -> None:
    damaged_folder(tmp_path)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*")}
    open_images(tmp_path, 13, require_captions=False, on_error="skip")
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*")} == before


def test_a_long_caption_is_kept_whole_for_the_tokenizer_to_cut(tmp_path: Path) -> None:
    captioned(tmp_path, 1)
    (tmp_path / "000.txt").write_text("word " * 500)
    assert open_images(tmp_path, 11).captions == [[" ".join(["word"] * 500)]]


def varied(folder: Path) -> CaptionedImages:
    """Five wide pictures with three captions each, every augmentation on."""
    rows = []
    for i in range(5):
        pixels = np.random.default_rng(i).integers(0, 256, (11, 29), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        rows.append(json.dumps({"file_name": f"{i}.png", "text": [f"{i} a", f"{i} b", f"{i} c"]}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    return open_images(folder, 11, 1, caption_dropout=0.25, horizontal_flip=True, crop="random", seed=3)


def test_an_item_depends_on_its_place_in_training_alone(tmp_path: Path) -> None:
    images = varied(tmp_path)
    keys = [SampleKey(index, step, position) for index in range(5) for step in (1, 2, 700) for position in (0, 7)]
    first = {key: images[key] for key in keys}
    torch.manual_seed(99), random.seed(99), np.random.seed(99)  # ambient generators must not matter
    for key in reversed(keys):
        again = images[key]
        assert torch.equal(again["image"], first[key]["image"]) and again["caption"] == first[key]["caption"]
        assert again["index"] == key.index and again["key"] == key
    assert len({item["image"].numpy().tobytes() for item in first.values()}) > 20


def test_captions_vary_over_visits_and_are_dropped_as_often_as_asked(tmp_path: Path) -> None:
    images = varied(tmp_path)
    seen = [images[SampleKey(2, step, position)]["caption"] for step in range(1, 251) for position in range(8)]
    share = {caption: seen.count(caption) / len(seen) for caption in set(seen)}
    assert set(share) == {"", "2 a", "2 b", "2 c"}
    assert share[""] == pytest.approx(0.25, abs=0.04)  # 4 standard deviations of 2000 draws
    assert share["2 a"] == pytest.approx(0.25, abs=0.04)


def test_dropout_zero_and_one_are_exact(tmp_path: Path) -> None:
    captioned(tmp_path, 2)
    for dropout, expected in ((0.0, "number 1"), (1.0, "")):
        images = open_images(tmp_path, 11, caption_dropout=dropout)
        assert {images[SampleKey(1, step, 0)]["caption"] for step in range(50)} == {expected}


def test_flips_mirror_about_half_of_the_visits_and_nothing_else(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (11, 11), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    images = open_images(tmp_path, 11, 1, require_captions=False, horizontal_flip=True)
    plain = images[0]["image"]
    flipped = [not torch.equal(images[SampleKey(0, step, 0)]["image"], plain) for step in range(400)]
    assert 150 < sum(flipped) < 250
    step = flipped.index(True)
    assert torch.equal(images[SampleKey(0, step, 0)]["image"], plain.flip(-1))


def test_a_plain_index_gives_the_first_caption_and_the_middle(tmp_path: Path) -> None:
    images = varied(tmp_path)
    item = images[4]
    assert item["caption"] == "4 a" and item["index"] == 4
    stored = np.asarray(Image.open(tmp_path / "4.png"))[:, 9:20]
    torch.testing.assert_close(item["image"][0], torch.from_numpy(stored.copy()) / 127.5 - 1)
    assert images[-1]["index"] == 4
    with pytest.raises(IndexError):
        images[5]


def test_reading_from_disk_gives_the_same_items_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = varied(tmp_path)
    monkeypatch.setattr(data, "MEMORY_LIMIT", 700)
    read = varied(tmp_path)
    assert held.in_memory and not read.in_memory
    assert "held in memory" in held.summary() and "read from disk" in read.summary()
    for key in (0, 3, SampleKey(1, 5, 2), SampleKey(4, 6, 1)):
        assert torch.equal(held[key]["image"], read[key]["image"])


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_loader_processes_give_the_same_batches(tmp_path: Path, start_method: str) -> None:
    images = varied(tmp_path)
    sampler = GlobalBatchSampler(len(images), 3, seed=3)
    expected = [collate([images[key] for key in keys]) for keys, _ in zip(sampler, range(3), strict=False)]
    loader = DataLoader(
        images, batch_sampler=sampler, collate_fn=collate, num_workers=1, multiprocessing_context=start_method
    )
    for batch, wanted in zip(loader, expected, strict=False):
        assert torch.equal(batch["image"], wanted["image"]) and torch.equal(batch["index"], wanted["index"])
        assert batch["caption"] == wanted["caption"] and batch["key"] == wanted["key"]


def test_a_data_set_survives_pickling(tmp_path: Path) -> None:
    images = varied(tmp_path)
    copy = pickle.loads(pickle.dumps(images))
    assert torch.equal(copy[2]["image"], images[2]["image"]) and copy.captions == images.captions


def test_a_picture_that_breaks_during_training_is_replaced_by_the_same_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MEMORY_LIMIT", 0)
    images = open_images(captioned(tmp_path, 5), 11, 1, caption_dropout=0.0)
    (tmp_path / "003.png").write_bytes(b"")
    (tmp_path / "004.png").unlink()
    for _ in range(2):
        item = images[SampleKey(3, 7, 2)]
        assert item["caption"] == "number 0" and item["index"] == 0 and item["key"] == SampleKey(0, 7, 2)
        assert item["replaced"] == f"{tmp_path / '003.png'}: the file is empty"
        torch.testing.assert_close(item["image"], -torch.ones(1, 11, 11))
    whole = collate([images[SampleKey(index, 1, index)] for index in range(5)])
    assert whole["image"].shape == (5, 1, 11, 11) and len(whole["replaced"]) == 2
    assert images[SampleKey(2, 1, 0)]["replaced"] == ""
    with pytest.raises(DataError, match=r"003\.png: the file is empty"):
        images[3]  # where no one counts, nothing is replaced
    for path in tmp_path.glob("*.png"):
        path.unlink()
    with pytest.raises(DataError, match=r"001\.png: No such file.*; 8 pictures in a row"):
        images[SampleKey(1, 1, 0)]


def test_more_than_one_in_twenty_replaced_pictures_stop_the_run() -> None:
    count = ReplacedPictures()
    for _ in range(9):
        count.add(1, 10)  # a share is nothing yet
    count = ReplacedPictures()
    for _ in range(20):
        count.add(1, 20)
    with pytest.raises(DataError, match=r"21 of 400 pictures could not be read any more .* over 5%"):
        count.add(1, 0)


def test_the_list_of_what_was_skipped_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    images = open_images(damaged_folder(tmp_path), 13, require_captions=False, on_error="skip")
    out = tmp_path.parent / "skipped.tsv"
    images.write_faults(out)
    lines = [line.split("\t") for line in out.read_text(encoding="utf-8").splitlines()]
    assert lines[0] == ["kind", "path", "reason"]
    assert [(kind, Path(path).name) for kind, path, _ in lines[1:]] == [
        ("empty file", "b.png"),
        ("not a picture", "c.jpg"),
        ("damaged picture", "cut.jpg"),
        ("not a picture", "d.webp"),
    ]


def shapes_folder(folder: Path) -> Path:
    for i, size in enumerate([(40, 20)] * 5 + [(20, 40)] * 4 + [(31, 29)] * 7 + [(200, 3)]):
        Image.new("L", size, 10 * i).save(folder / f"{i:02d}.png")
    return folder


@pytest.mark.parametrize("memory", [1 << 20, 0])
def test_with_buckets_every_batch_has_one_size_and_every_picture_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    monkeypatch.setattr(data, "MEMORY_LIMIT", memory)
    images = open_images(shapes_folder(tmp_path), 24, 1, require_captions=False, buckets=True, multiple_of=4)
    assert images.in_memory == bool(memory)
    sizes, seen = set(), set()
    for batch, _ in zip(images.batches(3), range(12), strict=False):
        height, width = batch["image"].shape[2:]
        assert height % 4 == width % 4 == 0 and abs(height * width / 24**2 - 1) < 0.2
        sizes.add((width, height))
        seen |= set(batch["index"].tolist())
    assert sizes == {(36, 16), (16, 36), (24, 24), (48, 12)}
    assert seen == set(range(17))
    assert "in 4 buckets, width x height: 16 x 36: 4, 24 x 24: 7, 36 x 16: 5, 48 x 12: 1" in images.summary()
    assert images[0]["image"].shape == (1, 16, 36)


def test_a_substitute_has_the_size_of_its_batch_and_so_has_a_file_that_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MEMORY_LIMIT", 0)
    images = open_images(shapes_folder(tmp_path), 24, 1, require_captions=False, buckets=True, multiple_of=4)
    (tmp_path / "04.png").unlink()
    Image.new("L", (20, 40)).save(tmp_path / "03.png")
    assert images[SampleKey(4, 1, 0)]["index"] == 0
    assert images[SampleKey(4, 1, 0)]["image"].shape == images[SampleKey(3, 1, 0)]["image"].shape == (1, 16, 36)


def test_batches_are_those_of_the_sampler_and_resume_in_the_middle(tmp_path: Path) -> None:
    images = varied(tmp_path)
    straight = [batch["key"] for batch, _ in zip(images.batches(4), range(6), strict=False)]
    resumed = [batch["key"] for batch, _ in zip(images.batches(4, start_step=3), range(4), strict=False)]
    assert straight == [keys for keys, _ in zip(GlobalBatchSampler(5, 4, 3), range(6), strict=False)]
    assert resumed == straight[2:]
    half = next(images.batches(4, start_step=2, rank=1, world_size=2))
    assert half["key"] == straight[1][2:]


def test_a_set_smaller_than_the_batch_is_refused_with_both_numbers(tmp_path: Path) -> None:
    images = open_images(captioned(tmp_path, 3), 11)
    images.check_batch_size(3)
    with pytest.raises(DataError, match=r"3 pictures, fewer than train.batch_size 4"):
        images.check_batch_size(4)


def test_small_pictures_are_enlarged_and_counted(tmp_path: Path) -> None:
    captioned(tmp_path, 2, size=(7, 5))
    images = open_images(tmp_path, 11)
    assert images[1]["image"].shape == (3, 11, 11)
    assert "2 pictures are smaller than they are trained" in images.summary()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("resolution", 0, "resolution must be at least 1, got 0"),
        ("channels", 4, "channels .* must be 1 .* got 4"),
        ("caption_dropout", 1.5, r"caption_dropout must be in \[0, 1\], got 1.5"),
        ("crop", "middle", "crop must be .* 'middle'"),
        ("on_error", "ignore", "on_error must be .* 'ignore'"),
        ("background", "whitish", "background must be a colour"),
        ("num_workers", -1, "num_workers must be at least 0, got -1"),
        ("max_pixels", 0, "max_pixels must be at least 1, got 0"),
        ("class_template", "a photo", r'class_template must hold "\{\}" once'),
        ("caption_extension", ".", "caption_extension must be like .txt"),
    ],
)
def test_options_out_of_range_are_refused_by_name(tmp_path: Path, option: str, value: object, message: str) -> None:
    captioned(tmp_path, 1)
    with pytest.raises(ValueError, match=message):
        open_images(tmp_path, **{option: value})
    with pytest.raises(ValueError, match=r"data\.path must be a folder or a data set, got ''"):
        DataOptions(path="")
