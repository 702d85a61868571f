"""Captions that are there but not found are named, and names of folders are not trained on in their place."""

import json
from pathlib import Path

import pytest
from PIL import Image

from unet_attn.data import CaptionedImages, DataError, DataOptions
from unet_attn.sources import find_pictures

UNUSED = "are not used: they are captions only where nothing else looks like one"


def put(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            Image.new("L", (5, 3), 200).save(path)
        else:
            path.write_text(f"words of {name}")


@pytest.mark.parametrize(
    ("pictures", "texts", "note"),
    [
        (
            ["cat/a.png", "dog/b.png"],
            ["cat/a.png.txt"],
            "1 file .txt belongs to no picture: {}/cat/a.png.txt; the capt",
        ),
        (["cat/a.png", "dog/b.png"], ["cat/A.txt"], "1 file .txt belongs to no picture: {}/cat/A.txt; the caption of"),
        (
            ["images/1/a.png", "images/2/b.png"],
            ["captions/a.txt", "captions/b.txt"],
            "2 files .txt belong to no picture, the first is {}/captions/a.txt; the caption of NAME.png is NAME",
        ),
        (["1/a.png", "2/b.png", "2/c.png"], ["x.txt", "y.txt"], "2 files .txt belong to no picture, the first is"),
    ],
)
def test_texts_that_belong_to_no_picture_end_class_folders(
    tmp_path: Path, pictures: list[str], texts: list[str], note: str
) -> None:
    put(tmp_path, *pictures, *texts)
    found = find_pictures(tmp_path)
    assert not any(found.captions) and found.kind == "none"
    assert any(given.startswith(note.format(tmp_path)) for given in found.notes)
    assert any(given.endswith(UNUSED) for given in found.notes)
    with pytest.raises(DataError, match=r"has a caption: .* to no picture"):
        CaptionedImages(DataOptions(path=str(tmp_path)))


def test_a_read_me_among_class_folders_is_named_and_costs_no_caption(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png", "README.txt", "dog/LICENSE.TXT")
    found = find_pictures(tmp_path)
    assert found.captions == [["cat"], ["cat"], ["dog"], ["dog"]]
    assert found.kind == "the names of 2 folders (cat, dog)"
    (note,) = found.notes
    assert note.startswith(f"2 files .txt belong to no picture, the first is {tmp_path}/README.txt; ")


@pytest.mark.parametrize("name", ["captions.jsonl", "captions.csv", "metadata.json"])
def test_a_table_of_captions_of_another_name_ends_class_folders(tmp_path: Path, name: str) -> None:
    put(tmp_path, "cat/1.png", "dog/1.png")
    rows = [json.dumps({"file_name": "cat/1.png", "text": "a tabby"})]
    (tmp_path / name).write_text("\n".join(rows if name.endswith("l") else ["file_name,text", "cat/1.png,a tabby"]))
    found = find_pictures(tmp_path)
    assert found.captions == [[], []]
    assert found.notes[0].startswith(f"{tmp_path / name} is not read: a table of captions is called metadata.jsonl or ")
    assert found.notes[1].endswith(UNUSED)


def test_tables_of_other_things_leave_class_folders_and_are_named(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.png", "dog/1.png")
    (tmp_path / "labels.csv").write_text("id,label\n1,cat\n")
    (tmp_path / "train.csv").write_text("id,label\n1,cat\n")
    (tmp_path / "info.json").write_text("{}")
    found = find_pictures(tmp_path)
    assert found.captions == [["cat"], ["dog"]]
    (note,) = found.notes
    assert note.startswith(f"{tmp_path}/labels.csv is not read (nor 1 other such file): a table of captions is called")


def test_a_text_left_over_beside_whole_captions_is_no_matter(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.txt", "README.txt", "other.csv")
    found = find_pictures(tmp_path)
    assert found.captions == [["words of a.txt"]] and found.notes == []
