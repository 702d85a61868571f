"""Pictures and captions are found wherever people keep them, and what is wrong is said with file, line and byte."""

import json
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from unet_attn.faults import DataError
from unet_attn.sources import Found, find_pictures


def put(folder: Path, *names: str) -> None:
    """Write small pictures of these names; the bytes are PNG whatever the extension says."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (5, 3), 200).save(path, "PNG")


def captions(found: Found, folder: Path) -> dict[str, list[str]]:
    return {p.relative_to(folder).as_posix(): c for p, c in zip(found.paths, found.captions, strict=True)}


def reasons(found: Found) -> list[str]:
    return [f"{fault.path.name}: {fault.reason}" for fault in found.faults]


def jsonl(folder: Path, *lines: object) -> None:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "metadata.jsonl").write_text(text, encoding="utf-8")


def test_unicode_spaces_and_dots_in_names_pair_with_their_own_captions(tmp_path: Path) -> None:
    folder = tmp_path / "my pictures"
    names = ["猫 1", "naïve é", "a b (2)", "x.y.z"]
    put(folder, *(f"{name}.png" for name in names))
    for name in names:
        (folder / f"{name}.txt").write_text(f"caption of {name}", encoding="utf-8")
    (folder / "x.txt").write_text("not for x.y.z")
    assert captions(find_pictures(folder), folder) == {f"{name}.png": [f"caption of {name}"] for name in names}


def test_a_caption_named_by_another_unicode_form_is_found(tmp_path: Path) -> None:
    put(tmp_path, "cafe\u0301.png")  # as macOS writes it
    (tmp_path / "caf\u00e9.txt").write_text("a cup")
    assert find_pictures(tmp_path).captions == [["a cup"]]


def test_extensions_of_pictures_and_captions_match_in_any_case(tmp_path: Path) -> None:
    put(tmp_path, "a.JPG", "b.JPEG", "c.PNG", "d.WebP", "e.bmp")
    for name in ("a.txt", "b.TXT", "c.Txt", "D.txt"):
        (tmp_path / name).write_text(name[0])
    assert captions(find_pictures(tmp_path), tmp_path) == {
        "a.JPG": ["a"],
        "b.JPEG": ["b"],
        "c.PNG": ["c"],
        "d.WebP": [],  # the case of the name itself counts
        "e.bmp": [],
    }


@pytest.mark.parametrize("extension", ["caption", ".caption", ".CAPTION"])
def test_the_caption_extension_works_with_and_without_its_dot(tmp_path: Path, extension: str) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / "a.caption").write_text("one")
    (tmp_path / "b.caption").write_text("two")
    assert find_pictures(tmp_path, extension).captions == [["one"], ["two"]]


def test_captions_with_another_extension_are_pointed_out(tmp_path: Path) -> None:
    put(tmp_path, "x/a.png", "y/b.png")
    (tmp_path / "x/a.caption").write_text("one")
    found = find_pictures(tmp_path)
    assert found.captions == [[], []], "folder names must not stand in for captions that are there"
    assert any("set caption_extension to .caption" in note for note in found.notes)


def test_missing_empty_and_pictureless_folders_are_named_with_what_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("a")
    (tmp_path / "file").write_text("a")
    for name, what in [("gone", "does not exist"), ("empty", "among 0"), ("text", "among 1"), ("file", "not a folder")]:
        with pytest.raises(DataError, match=rf"{name}.*0 pictures|{name}.*{what}") as error:
            find_pictures(tmp_path / name)
        assert what in str(error.value) and " 0 pictures" in str(error.value) and ".jpg" in str(error.value)


@pytest.mark.parametrize("suffix", ["HEIC", "raf", "orf", "rw2", "hif", "j2k", "jpx", "exr", "pcx"])
def test_pictures_of_unreadable_formats_are_counted_by_name(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"IMG_1.{suffix}").write_bytes(b"x")
    with pytest.raises(DataError, match=rf"1 \.{suffix.lower()} \(convert"):
        find_pictures(tmp_path)
    put(tmp_path, "a.png")
    assert any(f"1 .{suffix.lower()}" in note for note in find_pictures(tmp_path).notes)


def test_files_of_a_data_set_are_named_where_pictures_lie_beside_them(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    for name in ("a.txt", "data/0.parquet", "data/1.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    assert find_pictures(tmp_path).notes == [
        f"{tmp_path}/data/0.parquet is not read (nor 1 other such file): "
        "a data set is read where no picture lies in its folder, or where data.path is its file"
    ]


def test_nested_folders_are_searched_and_hidden_files_counted(tmp_path: Path) -> None:
    put(tmp_path, "b.png", "1/2/3/a.png", ".hidden.png", "._b.png", ".trash/c.png", "__MACOSX/b.png")
    (tmp_path / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "1/loop").symlink_to(tmp_path)
    found = find_pictures(tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in found.paths] == ["1/2/3/a.png", "b.png"]
    assert "hidden or system: 3 files and 2 folders ignored" in found.notes


def write_run(folder: Path) -> None:
    """What a training leaves behind, as far as it tells it from pictures."""
    put(folder, "samples/step-000500.png")
    (folder / "logs").mkdir()
    (folder / "config.yaml").write_text("data: {}")


def test_a_training_run_among_the_pictures_is_left_out_and_named(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b/c.png")
    write_run(tmp_path / "runs/first")
    (tmp_path / "b/config.yaml").write_text("of another tool")
    found = find_pictures(tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in found.paths] == ["a.png", "b/c.png"]
    assert f"1 training run ignored, with all pictures in it: {tmp_path / 'runs/first'}" in found.notes


def test_the_folder_of_a_training_run_is_no_data(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run/model_index.json").write_text("{}")
    with pytest.raises(DataError, match=r"is that of a training run .*: give the folder of the pictures"):
        find_pictures(tmp_path / "run")
    with pytest.raises(DataError, match=r"0 pictures among 0 files .*; 1 training run ignored"):
        find_pictures(tmp_path)


def test_a_byte_order_mark_and_line_breaks_are_no_part_of_a_caption(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png", "c.png")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa cat's\r\nhat \r\n")
    (tmp_path / "b.txt").write_bytes(b" \r\n")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbf\xef\xbb\xbfcat")  # by two programs that write one each
    assert find_pictures(tmp_path).captions == [["a cat's hat"], [], ["cat"]]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a cat\x92s hat", r"not UTF-8 at byte 5 \(0x92\)"),
        (b"\xef\xbb\xbfa cat\x92s hat", r"not UTF-8 at byte 8 \(0x92\)"),
        ("a hat".encode("utf-16"), "UTF-16"),
        ("a hat".encode("utf-16-le"), "zero byte at byte 1"),
        (b"x" * (1 << 20) + b"x", "no caption"),
    ],
)
def test_a_caption_in_another_encoding_is_a_fault_with_file_and_byte(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_text("good")
    found = find_pictures(tmp_path)
    assert captions(found, tmp_path) == {"b.png": ["good"]}
    assert re.match(rf"a\.txt: .*{reason}", reasons(found)[0])


def test_metadata_rows_give_one_or_several_captions(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "sub/b.png", "c.png", "d.png")
    jsonl(
        tmp_path,
        {"file_name": "a.png", "text": "one"},
        {"file_name": "sub/b.png", "text": ["two", " ", "three\n"]},
        {"file_name": "d.png", "text": None},
        {"file_name": "a.png", "text": "uno"},
        "",
    )
    found = find_pictures(tmp_path)
    assert captions(found, tmp_path) == {
        "a.png": ["one", "uno"],
        "c.png": [],
        "d.png": [],
        "sub/b.png": ["two", "three"],
    }
    assert found.kind == "metadata.jsonl" and not found.faults


def test_each_flaw_of_a_metadata_file_is_reported_with_its_line(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png", "c.png")
    jsonl(
        tmp_path,
        {"file_name": "gone.png", "text": "missing file"},
        {"file_name": "train/a.png", "text": "the file lies beside"},
        "",
        '{"file_name": "b.png", "text": "broken',
        {"file_name": "c.png", "text": 3},
        {"text": "no name"},
        "[1, 2]",
        {"file_name": "b.png", "text": "good"},
    )
    found = find_pictures(tmp_path)
    assert captions(found, tmp_path) == {"a.png": [], "b.png": ["good"], "c.png": []}
    expected = ["line 1: no file gone.png", 'line 2: .* write "file_name": "a.png"', "line 4: broken JSON"]
    expected += ["line 5: text must be", "line 6: file_name must be a path", "line 7: expected"]
    assert len(reasons(found)) == len(expected)
    for reason, pattern in zip(reasons(found), expected, strict=True):
        assert re.match(f"metadata.jsonl: {pattern}", reason)
    assert any("1 blank line ignored, the first is line 3" in note for note in found.notes)


def test_a_misnamed_metadata_file_is_pointed_out(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "metadata.json").write_text("[]")
    assert any(
        "metadata.json is not read: a table of captions is called metadata.jsonl" in n
        for n in find_pictures(tmp_path).notes
    )


def test_metadata_paths_with_backslashes_or_dots_are_understood_and_outside_ones_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    put(folder, "sub/a.png", "b.png")
    put(tmp_path, "out.png")
    jsonl(
        folder,
        {"file_name": "sub\\a.png", "text": "one"},
        {"file_name": "./sub/../b.png", "text": "two"},
        {"file_name": "../out.png", "text": "three"},
    )
    found = find_pictures(folder)
    assert found.captions == [["two"], ["one"]]
    assert len(found.faults) == 1 and "line 3: ../out.png is not a picture below" in reasons(found)[0]


def test_csv_metadata_is_read_and_its_flaws_named(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png", "c.png")
    table = tmp_path / "metadata.csv"
    table.write_bytes(b'\xef\xbb\xbffile_name,text\r\na.png,"one, and\r\n two"\r\nb.png,cut,here\r\nc.png\r\n')
    found = find_pictures(tmp_path)
    assert captions(found, tmp_path) == {"a.png": ["one, and two"], "b.png": [], "c.png": []}
    assert len(found.faults) == 1 and "line 4: more cells than columns" in reasons(found)[0]
    table.write_text('file_name,text\na.png,"5 inch\nb.png,two\nc.png,three\n')  # a quote that is never closed
    assert "unexpected end of data" in reasons(find_pictures(tmp_path))[0]
    table.write_text("file;text\na.png;one\n")
    assert "has no column file_name; its first line is 'file;text'" in reasons(find_pictures(tmp_path))[0]


def test_parquet_metadata_is_read_and_its_flaws_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    put(tmp_path, "a.png", "sub/b.png", "c.png")
    names, texts = ["a.png", "sub/b.png", "gone.png"], [["one", "two"], ["three"], None]
    table = pyarrow.table({"file_name": names, "text": texts, "bytes": [b"x"] * 3})
    parquet.write_table(table, tmp_path / "metadata.parquet")
    found = find_pictures(tmp_path)
    assert captions(found, tmp_path) == {"a.png": ["one", "two"], "c.png": [], "sub/b.png": ["three"]}
    assert found.kind == "metadata.parquet"
    assert reasons(found) == ["metadata.parquet: row 3: no file gone.png (paths are relative to metadata.parquet)"]
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a.png"])] * 3, names=["file_name", "text", "text"])
    parquet.write_table(twice, tmp_path / "metadata.parquet")
    assert reasons(find_pictures(tmp_path)) == ["metadata.parquet: column text stands 2 times: which one is meant?"]
    parquet.write_table(pyarrow.table({"name": ["a.png"]}), tmp_path / "metadata.parquet")
    assert reasons(find_pictures(tmp_path)) == ["metadata.parquet: has no column file_name, only name"]
    (tmp_path / "metadata.parquet").write_bytes(b"PAR1 and no more")
    assert "metadata.parquet: cannot be read after row 0 (" in reasons(find_pictures(tmp_path))[0]


def test_without_pyarrow_parquet_metadata_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "metadata.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'unet-attn\[data\]'"):
        find_pictures(tmp_path)


def test_the_captions_may_stand_in_another_column(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    jsonl(tmp_path, {"file_name": "a.png", "caption": "one"})
    assert find_pictures(tmp_path, text_column="caption").captions == [["one"]]
    found = find_pictures(tmp_path)
    assert found.captions == [[]]
    assert any("metadata.jsonl has no column text: set text_column" in note for note in found.notes)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"file_name": "a.png", "text": "\\ud83d"}', "half a character"),
        ('{"file_name": "\\ud83d.png", "text": "x"}', "no file"),
        (json.dumps({"file_name": "x" * 5000, "text": "x"}), "no file xxx"),
        ('{"file_name": "a\\u0000.png", "text": "x"}', "no file a"),
        ("9" * 5000, "broken JSON"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_odd_values_in_a_row_are_faults_that_can_be_printed(tmp_path: Path, row: str, reason: str) -> None:
    put(tmp_path, "a.png")
    jsonl(tmp_path, row)
    (fault,) = find_pictures(tmp_path).faults
    assert reason in fault.reason and str(fault).encode("utf-8")


def test_a_name_that_looks_like_the_hubs_gets_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"someone/pictures does not exist.*set data.image_column"):
        find_pictures(Path("someone/pictures"))


def test_a_metadata_row_goes_before_a_text_file_and_both_are_named(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png", "c.png")
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("from the text file")
    jsonl(tmp_path, {"file_name": "a.png", "text": "from the row"}, {"file_name": "c.png", "score": 7})
    found = find_pictures(tmp_path)
    assert found.captions == [["from the row"], ["from the text file"], ["from the text file"]]
    assert found.kind == "metadata.jsonl and .txt files"


def test_class_folders_give_their_names_as_captions(tmp_path: Path) -> None:
    put(tmp_path, "train/sea_lion/1.png", "train/polar-bear/1.png", "train/polar-bear/2.png")
    found = find_pictures(tmp_path)
    assert found.captions == [["polar bear"], ["polar bear"], ["sea lion"]]
    assert found.kind == "the names of 2 folders (polar bear, sea lion)"
    template = find_pictures(tmp_path, class_template="a photo of a {}").captions
    assert template == [["a photo of a polar bear"], ["a photo of a polar bear"], ["a photo of a sea lion"]]


def test_one_folder_is_no_class(tmp_path: Path) -> None:
    put(tmp_path, "only/1.png", "only/2.png")
    assert find_pictures(tmp_path).captions == [[], []]


def test_a_loose_picture_beside_class_folders_is_named_and_costs_the_others_no_caption(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.png", "cat/2.png", "cover.png", "dog/1.png")
    found = find_pictures(tmp_path)
    assert found.captions == [["cat"], ["cat"], [], ["dog"]]
    assert found.kind == "the names of 2 folders (cat, dog)"
    assert found.notes == [
        "1 picture lies beside the class folders, without a caption (cover.png): "
        "a picture gets one in a folder whose name is its caption"
    ]


def test_where_half_of_the_pictures_are_loose_folder_names_are_no_captions_and_it_is_said(tmp_path: Path) -> None:
    put(tmp_path, "new/1.png", "old/1.png", *(f"{number}.png" for number in range(7)))
    found = find_pictures(tmp_path)
    assert not any(found.captions) and found.kind == "none"
    beside = "7 pictures lie beside them (0.png, 1.png, 2.png, 3.png, 4.png, ...)"
    assert found.notes == [f"the names of 2 folders (new, old) are no captions, as {beside}"]


def test_a_caption_file_in_class_folders_is_said_to_end_them(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png")
    (tmp_path / "cat/1.txt").write_text("a tabby")
    found = find_pictures(tmp_path)
    assert found.captions == [["a tabby"], [], []]
    assert any("names of 2 folders (cat, dog) are not used: they are captions only where" in n for n in found.notes)


def test_what_cameras_keep_beside_a_picture_is_no_caption(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.jpg", "dog/1.jpg")
    for name in ("cat/1.MOV", "cat/1.AAE", "dog/1.xmp", "dog/1.npz"):
        (tmp_path / name).write_bytes(b"x")
    found = find_pictures(tmp_path)
    assert found.captions == [["cat"], ["dog"]] and found.notes == []


def test_a_column_that_stands_twice_is_a_fault(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    table = tmp_path / "metadata.csv"
    table.write_text("file_name,text,text\na.png,one,two\n")
    assert reasons(find_pictures(tmp_path)) == [
        "metadata.csv: column text stands 2 times in its first line: which one is meant?"
    ]
    table.write_text("file_name,note,note,text\na.png,x,y,one\n")  # nobody asks for these
    assert find_pictures(tmp_path).captions == [["one"]]
    table.unlink()
    jsonl(tmp_path, '{"file_name": "a.png", "text": "one", "text": "two"}')
    assert reasons(find_pictures(tmp_path)) == ["metadata.jsonl: line 1: broken JSON (text stands 2 times)"]
