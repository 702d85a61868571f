"""Tables of captions: where in a table a fault stands, and which picture a row means."""

from pathlib import Path

import pytest
from PIL import Image

from unet_attn.sources import find_pictures


def put(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (5, 3), 200).save(path)


HEAD = "file_name,text\n"
MANY = "more cells than columns"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ('a.png,one\nb.png,two\nc.png,"x"y\n', ["line 4: ',' expected"]),
        ('"x"y,one\nb.png,two\n', ["line 2: ',' expected"]),
        ('a.png,one\nb.png,two\nc.png,"three\na.png,four\n', ["line 4: unexpected end of data"]),
        ("a.png,one,1\nb.png,two\n", [f"line 2: {MANY}"]),
        ("a.png,one\n\n\nb.png,two,2\nc.png,three\ngone.png,four\n", [f"line 5: {MANY}", "line 7: no file gone.png"]),
        ('gone.png,"of\nthree\nlines"\nb.png,"and\ntwo",2\n', ["line 2: no file gone.png", f"line 5: {MANY}"]),
        ('a.png,"of\ntwo lines"\nb.png,"and\n"two"\n', ["line 4: ',' expected"]),
    ],
)
def test_a_fault_of_a_csv_table_names_the_line_in_which_its_row_begins(
    rows: str, expected: list[str], tmp_path: Path
) -> None:
    put(tmp_path, "a.png", "b.png", "c.png")
    (tmp_path / "metadata.csv").write_text(HEAD + rows)
    reasons = [fault.reason for fault in find_pictures(tmp_path).faults]
    assert len(reasons) == len(expected)
    for reason, start in zip(reasons, expected, strict=True):
        assert reason.startswith(start)


def test_blanks_behind_the_commas_of_a_csv_table_are_no_part_of_it(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / "metadata.csv").write_text('text , file_name\n"one, two", a.png\nthree, b.png\n')
    found = find_pictures(tmp_path)
    assert found.captions == [["one, two"], ["three"]] and not found.faults


def test_a_first_line_that_is_broken_is_named(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text('"file_name"s,text\na.png,one\n')
    assert [fault.reason[:7] for fault in find_pictures(tmp_path).faults] == ["line 1:"]


@pytest.mark.parametrize("folder", ["f 1/../f 40", "f 40"])
def test_rows_are_understood_in_a_folder_that_is_named_by_way_of_another(folder: str, tmp_path: Path) -> None:
    (tmp_path / "f 1").mkdir()
    put(tmp_path, "f 40/img/a.png", "f 40/tables/b.png", "f 1/out.png")
    names = ("../img/a.png", "b.png", "..\\tables\\b.png", "../../f 1/out.png", "../a.png")
    rows = "".join(f"{name},{number}\n" for number, name in enumerate(names))
    (tmp_path / "f 40/tables/metadata.csv").write_text(HEAD + rows)
    found = find_pictures(tmp_path / folder)
    assert found.paths == [tmp_path / folder / "img/a.png", tmp_path / folder / "tables/b.png"]
    assert found.captions == [["0"], ["1", "2"]]
    assert [fault.reason[:33] for fault in found.faults] == [
        "line 5: ../../f 1/out.png is not ",
        "line 6: no file ../a.png (paths a",
    ]
