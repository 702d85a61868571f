"""What evaluate.py and steps.py compare: never a sampled picture with the one that its caption comes from."""

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from pipeline_parts import tiny_pipeline
from test_evaluate_script import noise_folder, saved_judge
from torch import Tensor

from unet_attn.data import load_image, to_tensor

ROOT = Path(__file__).resolve().parent.parent
COUNT = 107


@pytest.fixture
def repeating(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """A script run with a model that repeats the training picture of a caption."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    tiny_pipeline().save_pretrained(tmp_path / "run")
    data, judge = noise_folder(tmp_path / "data", count=COUNT), saved_judge(tmp_path / "judge")

    def repeated(pipeline: object, captions: list[str], **options: object) -> Iterator[Tensor]:
        for caption in captions:
            yield to_tensor(load_image(data / f"{caption.removeprefix('noise ')}.png"))

    monkeypatch.setattr("unet_attn.evaluation.sample_pictures", repeated)

    def run(name: str, *arguments: str) -> int:
        options = (tmp_path / "run", "--data.path", data, "--features", "judge", "--judge", judge)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options), *arguments])
        return import_module(name).main()

    return run


@pytest.mark.parametrize("pictures", [COUNT, 2 * COUNT])
def test_a_model_that_repeats_all_training_pictures_is_at_distance_0(
    repeating: Callable[..., int], tmp_path: Path, pictures: int
) -> None:
    assert repeating("evaluate", "--num_pictures", str(pictures)) == 0

    report = json.loads((tmp_path / "run" / "evaluation.json").read_text(encoding="utf-8"))
    # if each were held against its own picture too, it would be far below
    assert (report["kid"], report["kid_error"]) == pytest.approx((0, 0), abs=1e-6)
    assert report["precision"] < 1  # as between any two halves of the data
    assert (report["real_pictures"], report["sampled_pictures"]) == (COUNT, pictures)


def test_a_run_trained_on_a_table_is_compared_with_a_folder_of_pictures_too(
    scripts: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    folder, run = noise_folder(tmp_path / "data", count=3), tmp_path / "run"
    table = tmp_path / "tables" / "train.parquet"
    for file, text in ((run / "config.yaml", "data: {path: t.parquet, image_column: image, split: test}"), (table, "")):
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")

    assert len(scripts("_evaluation_plan").read_pictures(folder, run, tiny_pipeline(), trained_on=False)) == 3

    options, section = scripts("_reading").reading_options, {"path": str(folder), "image_column": "image"}
    assert options(section, folder) == {"image_column": "image"}, "as the run itself read it"
    assert options(section, table.parent) == options(section, table) == {"image_column": "image"}
    assert options(section, tmp_path / "owner" / "of the hub") == {"image_column": "image"}


def test_the_table_of_steps_compares_in_the_same_way(
    repeating: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert repeating("steps", "--num_pictures", str(COUNT), "--steps", "1") == 0

    row = capsys.readouterr().out.splitlines()[-1].split("|")
    assert row[4].strip().lstrip("-") == "0.0 ± 0.0"


def test_the_reference_is_up_to_its_limit_all_of_the_data_and_begins_with_the_pictures_asked_for(
    repeating: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unet_attn.evaluation.MOST_REAL", 83)

    for pictures in (67, COUNT):  # the captions of some of which are not of the reference
        assert repeating("evaluate", "--num_pictures", str(pictures)) == 0

        report = json.loads((tmp_path / "run" / "evaluation.json").read_text(encoding="utf-8"))
        assert (report["real_pictures"], report["sampled_pictures"]) == (83, pictures)
        assert abs(report["kid"]) < 3 * report["kid_error"]
