"""The spoiled sets of the sensitivity table are what their names say."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_evaluate_script import noise_folder, saved_judge

from unet_attn.judge import Judge, JudgeFeatures

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def sensitivity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return import_module("sensitivity")


def test_each_set_is_of_the_same_size_and_spoiled_as_it_says(sensitivity: ModuleType) -> None:
    pictures = torch.rand(61, 1, 5, 5, generator=torch.Generator().manual_seed(0)) * 2 - 1
    captions = [f"{'common' if n % 3 == 0 else 'rare'}{n % 7} {'fill' if n % 4 == 0 else 'line'}" for n in range(61)]
    held_out, reference, spare = list(range(13)), list(range(13, 26)), list(range(26, 61))

    folders = ["a" if n % 2 else "b" for n in range(61)]

    parts = {"held_out": held_out, "reference": reference, "spare": spare}
    sets = {each.name: each for each in sensitivity.spoiled_sets(pictures, captions, folders, **parts, seed=0)}

    assert all(len(each.pictures) == len(each.captions) == 13 for each in sets.values())
    real = sets.pop("real")
    assert torch.equal(real.pictures, pictures[:13]) and real.captions == captions[:13]
    without = sets["without 'line' in the caption"]
    assert not any("line" in caption.split() for caption in without.captions) and without.judged == 4
    without = sets["without the folder 'b'"]
    kept = [1, 3, 5, 7, 9, 11, *range(27, 41, 2)]
    assert torch.equal(without.pictures, pictures[kept]) and without.judged == 6
    noise = sets["noise of 0.2"].pictures - real.pictures
    assert 0.1 < noise.std() < 0.25 and sets["noise of 0.2"].pictures.abs().max() <= 1
    assert sets["blurred, 3 x 3"].pictures.std() < 0.6 * real.pictures.std()
    exchanged = sets["captions exchanged"]
    assert torch.equal(exchanged.pictures, real.pictures)
    assert all(other != own for other, own in zip(exchanged.captions, real.captions, strict=True))
    copies = sets["half are copies"]
    assert torch.equal(copies.pictures[6:], pictures[13:20]) and copies.judged == 6
    # the held-out pictures lie in the order of their folders: a first half would be of other kinds
    assert torch.equal(copies.pictures[:6], pictures[1:13:2])


def test_the_most_frequent_word_is_counted_over_captions(sensitivity: ModuleType) -> None:
    assert sensitivity.most_frequent(sensitivity.words(["a b", "b c", "d b a"])) == "b"


def test_the_table_has_a_row_for_each_set_and_sees_what_was_done_to_it(sensitivity: ModuleType, tmp_path: Path) -> None:
    data = noise_folder(tmp_path / "data", count=211)
    judge = Judge.load(saved_judge(tmp_path / "judge"))
    judge.record["seed"] = 0

    table = sensitivity.sensitivity_table(data, judge, {"judge": JudgeFeatures(judge)}, seed=0)

    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert head[1:] == [
        *(f"{measure}, judge" for measure in ("KID x 1000", "Frechet", "precision", "recall")),
        "agreement",
        "near copies",
    ]
    # too few pictures are left to make up for a word or a folder that all of them have
    assert [row[0] for row in rows] == [
        "real",
        "noise of 0.2",
        "blurred, 3 x 3",
        "captions exchanged",
        "one picture for all",
        "half are copies",
    ]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["captions exchanged"][:4] == cells["real"][:4]
    assert cells["one picture for all"][3] == "0.000 ± 0.005"  # of 100, and 100 that it is compared with
    assert cells["real"][5] == "0.000 ± 0.005" and cells["half are copies"][5].startswith("0.500")
