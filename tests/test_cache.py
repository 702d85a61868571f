"""The second start is quick, because what was found out about unchanged files is remembered; nothing depends on it."""

import os
import pwd
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unet_attn import cache, data
from unet_attn.cache import CheckCache, Checked, cache_folder
from unet_attn.data import CaptionedImages, DataError, DataOptions


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "unet-attn" / "checks-1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(5):
        pixels = np.random.default_rng(i).integers(0, 256, (13, 17, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


def start(folder: Path, resolution: int = 11, **options: object) -> CaptionedImages:
    options = DataOptions(path=str(folder), resolution=resolution, on_error="skip", **options)
    return CaptionedImages(options, require_captions=False)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are decoded from now on."""
    names: list[str] = []
    decode = data.decode

    def noting(picture: Path, options: DataOptions, *, channels: int) -> Image.Image:
        names.append(picture.name)
        return decode(picture, options, channels=channels)

    monkeypatch.setattr(data, "decode", noting)
    return names


def test_a_second_start_decodes_nothing_and_sees_the_same(folder: Path, decoded: list[str]) -> None:
    first = start(folder)
    assert sorted(decoded) == ["0.png", "1.png", "2.png", "3.png", "4.png"]
    decoded.clear()
    second = start(folder)
    assert decoded == [] and second.in_memory
    assert all(torch.equal(first[i]["image"], second[i]["image"]) for i in range(5))
    assert first.image_sizes == second.image_sizes == [(17, 13)] * 5


def test_only_files_that_changed_or_are_new_are_read_again(folder: Path, decoded: list[str]) -> None:
    start(folder)
    decoded.clear()
    Image.new("L", (11, 11), 7).save(folder / "new.png")
    Image.new("RGB", (11, 11)).save(folder / "1.png")
    status = (folder / "2.png").stat()
    os.utime(folder / "2.png", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    (folder / "3.png").unlink()
    images = start(folder)
    assert sorted(decoded) == ["1.png", "2.png", "new.png"]
    assert torch.equal(images[1]["image"], -torch.ones(3, 11, 11)) and len(images) == 5


def test_pictures_of_one_length_and_time_that_change_their_names_are_read_again(folder: Path) -> None:
    for name, value in (("1", 70), ("2", 90)):
        Image.new("L", (11, 11), value).save(folder / f"{name}.bmp")
        os.utime(folder / f"{name}.bmp", (0, 0))
    before = start(folder)
    for old, new in (("1.bmp", "t"), ("2.bmp", "1.bmp"), ("t", "2.bmp")):
        (folder / old).rename(folder / new)
    after = start(folder)
    first, second = before.paths.index(folder / "1.bmp"), before.paths.index(folder / "2.bmp")
    assert torch.equal(after[first]["image"], before[second]["image"])
    assert torch.equal(after[second]["image"], before[first]["image"])


def test_faults_are_remembered_but_not_those_of_the_disk(folder: Path, decoded: list[str]) -> None:
    (folder / "0.png").write_bytes(b"")
    (folder / "link.png").symlink_to(folder / "gone.png")
    first = start(folder)
    decoded.clear()
    second = start(folder)
    assert decoded == ["link.png"]
    assert first.faults == second.faults and [fault.kind for fault in second.faults] == [
        "empty file",
        "unreadable file",
    ]


@pytest.mark.parametrize(
    "options", [{"resolution": 7}, {"crop": "random"}, {"background": "black"}, {"max_pixels": 1000}, {"buckets": True}]
)
def test_other_options_give_other_pixels_and_not_cached_ones(folder: Path, options: dict[str, object]) -> None:
    start(folder)
    cached = start(folder, **options)
    cache_folder().rename(folder.parent / "elsewhere")
    fresh = start(folder, **options)
    assert cached[0]["image"].shape == fresh[0]["image"].shape
    assert all(torch.equal(cached[i]["image"], fresh[i]["image"]) for i in range(5))


def test_a_limit_that_is_lowered_is_checked_again(folder: Path) -> None:
    start(folder)
    with pytest.raises(DataError, match="no usable picture"):
        start(folder, max_pixels=100)


def test_what_was_found_by_another_way_of_reading_is_not_believed(
    folder: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(folder)
    decoded.clear()
    monkeypatch.setattr(data, "READING", data.READING + 1)
    start(folder)
    assert len(decoded) == 5


def test_a_set_too_large_for_memory_is_checked_once_and_then_only_asked_for_its_files_times(
    folder: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MEMORY_LIMIT", 3 * 11 * 11 * 3)
    assert not start(folder).in_memory
    decoded.clear()
    images = start(folder, resolution=12)
    assert decoded == [] and not images.in_memory and images.image_sizes == [(17, 13)] * 5
    monkeypatch.setattr(data, "MEMORY_LIMIT", 1 << 20)
    assert start(folder).in_memory and sorted(decoded) == [f"{i}.png" for i in range(5)]


def spoil(path: Path, how: str) -> None:
    if how == "garbage":
        path.write_bytes(b"no database at all " * 100)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:700])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "folder":
        path.unlink()
        path.mkdir()
    else:
        with sqlite3.connect(path) as database:
            database.execute(
                {
                    "other table": "ALTER TABLE checked RENAME TO other",
                    "wrong types": "UPDATE checked SET width = 'wide', kind = NULL",
                    "short pixels": "UPDATE checked SET pixels = x'00'",
                    "no sizes": "UPDATE checked SET width = 0",
                }[how]
            )
        database.close()


@pytest.mark.parametrize(
    "how", ["garbage", "cut", "empty", "folder", "other table", "wrong types", "short pixels", "no sizes"]
)
def test_a_spoiled_cache_is_ignored(folder: Path, caches: Path, decoded: list[str], how: str) -> None:
    first = start(folder)
    (path,) = caches.glob("*.sqlite")
    spoil(path, how)
    decoded.clear()
    again = start(folder)
    assert sorted(decoded) == [f"{i}.png" for i in range(5)]
    assert all(torch.equal(first[i]["image"], again[i]["image"]) for i in range(5))
    if how != "folder":
        decoded.clear()
        start(folder)
        assert decoded == [], "a spoiled cache must be replaced by a good one"


def test_a_cache_that_cannot_be_written_costs_only_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(start(folder)) == 5


def test_nothing_is_cached_within_the_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "sub"))
    before = sorted(folder.rglob("*"))
    start(folder)
    assert sorted(folder.rglob("*")) == before


def test_the_cache_lies_where_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/path")  # the specification says to ignore it
    assert cache_folder() == Path.home() / ".cache" / "unet-attn"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/unet-attn")


def test_without_a_home_folder_nothing_is_kept(
    folder: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME"), monkeypatch.delenv("XDG_CACHE_HOME")
    start(folder), start(folder)
    assert len(decoded) == 10


def test_the_longest_unused_caches_make_room(tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CACHE_LIMIT", 50_000)
    for number in range(3):
        store = CheckCache(tmp_path / f"set{number}", guard="", settings="")
        store.store(["a"], ["1 1"], [Checked((100, 100), None, None, bytes(30_000))], [0])
        os.utime(store.path, (number, number))
    assert {path.name for path in caches.iterdir()} == {store.path.name}


def test_names_that_are_no_text_are_remembered_too(folder: Path, decoded: list[str]) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    Image.new("L", (11, 11)).save(folder / name)
    start(folder)
    decoded.clear()
    assert name in [path.name for path in start(folder).paths] and decoded == []
