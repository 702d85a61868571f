"""Several processes at one evaluation: the figures of one, errors that all are told, and launches that are refused."""

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from pipeline_parts import tiny_pipeline
from processes import run_group
from test_evaluate_script import noise_folder, saved_judge

from unet_attn.processes import Processes

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ("kid", "frechet", "precision", "recall", "agreement", "loss", "nearest")


def evaluated(arguments: list[str]) -> int:
    """Run the script as a process of its own does."""
    sys.path.insert(0, str(ROOT / "scripts"))
    sys.argv = ["evaluate.py", *arguments]
    return import_module("evaluate").main()


def evaluated_with_a_broken_sampler(arguments: list[str], fault: type[Exception], log: Path) -> int:
    """As `evaluated`, but the second process cannot sample; what each did is written to `log` and its rank."""
    evaluation = import_module("unet_attn.evaluation")
    rank = os.environ["RANK"]
    if rank == "1":

        def broken(*pipeline: object, **options: object) -> None:
            raise fault("out of luck")

        evaluation.sample_pictures = broken
    with Path(f"{log}{rank}").open("w") as told:
        sys.stderr = told
        try:
            told.write(f"exit code {evaluated(arguments)}")
        except fault as error:
            told.write(f"{fault.__name__}: {error}")
    return 0


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    tiny_pipeline().save_pretrained(tmp_path / "run")
    data, judge = noise_folder(tmp_path / "data"), saved_judge(tmp_path / "judge")
    (tmp_path / "run" / "config.yaml").write_text(f"data: {{path: {data}}}\n", encoding="utf-8")
    options = ("--judge", judge, "--features", "judge", "--num_pictures", 67, "--steps", 2, "--batch_size", 13)
    return [str(part) for part in (tmp_path / "run", "--data.path", data, *options)]


def test_two_processes_measure_what_one_does(arguments: list[str], tmp_path: Path) -> None:
    run_group(evaluated, [*arguments, "--json", str(tmp_path / "one.json")], size=1)
    run_group(evaluated, [*arguments, "--json", str(tmp_path / "two.json")])

    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert sorted(path.name for path in tmp_path.glob("two*")) == ["two.json", "two.svg", "two_nearest.png"]
    for figure in FIGURES:
        assert flat(two[figure]) == pytest.approx(flat(one[figure]), abs=1e-4), figure


def flat(figure: object) -> list[float]:
    """The numbers of a part of the result, in their order."""
    if isinstance(figure, dict):
        return [number for value in figure.values() for number in flat(value)]
    if isinstance(figure, list):
        return [number for value in figure for number in flat(value)]
    return [float(figure)] if isinstance(figure, int | float) else []


@pytest.mark.parametrize(
    ("fault", "second"), [(ValueError, "exit code 2"), (RuntimeError, "RuntimeError: out of luck")]
)
def test_an_error_in_one_process_ends_all_with_one_line(
    arguments: list[str], tmp_path: Path, fault: type[Exception], second: str
) -> None:
    run_group(evaluated_with_a_broken_sampler, arguments, fault, tmp_path / "log")

    said = (tmp_path / "log0").read_text().splitlines()[-2:]  # before them the sampler may have warned of a caption
    assert said == ["error: process 1: out of luck", "exit code 2"]
    assert (tmp_path / "log1").read_text() == second
    assert not (tmp_path / "run" / "evaluation.json").exists()


def refused_together(arguments: list[str], log: Path) -> int:
    """As `evaluated`; the exit code must be 2, and what was said is written to `log` and the rank."""
    with Path(f"{log}{os.environ['RANK']}").open("w") as told:
        sys.stderr = told
        return 0 if evaluated(arguments) == 2 else 1


def test_what_the_main_process_refuses_ends_the_others_too(arguments: list[str], tmp_path: Path) -> None:
    run_group(refused_together, [*arguments, "--num_pictures", "63"], tmp_path / "log")

    few = "error: 63 sampled pictures are too few to measure a distance: 64 are needed\n"
    assert [(tmp_path / f"log{rank}").read_text() for rank in (0, 1)] == [few, ""]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "True"}, "starts one process whatever was asked for"),
        ({"WORLD_SIZE": "2"}, "2 processes were launched, but Accelerate sees 1"),
    ],
)
def test_a_launch_whose_processes_would_not_meet_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # what a process sees that thinks it is alone; a real group would wait here for its second member
    alone: Callable[..., object] = lambda cpu, timeout: type("Alone", (), {"num_processes": 1})()  # noqa: E731
    monkeypatch.setattr("accelerate.PartialState", alone)

    with pytest.raises(ValueError, match=message):
        Processes("evaluate.py")
