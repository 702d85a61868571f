"""Two processes that learn together: what travels when, dropout, exit codes, and one that fails alone."""

import json
import os
import shutil
import sys
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import processes
import pytest
import torch
import two_processes
from accelerate import PartialState
from safetensors.torch import load_file
from torture import write_config

OPTIONS = {
    "batch_size": 12,
    "max_steps": 4,
    "warmup_steps": 1,
    "checkpoint_every": 2,
    "keep_checkpoints": None,
    "sample_every": None,
    "validate_every": None,
    "trackers": (),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("two"), steps=4)


def group_codes(work: object, *arguments: object) -> list[int | None]:
    with pytest.raises(AssertionError) as ended:
        processes.run_group(work, *arguments, seconds=60)
    return json.loads(str(ended.value).split("ended with ")[1].split(" (")[0].replace("None", "null"))


def on_two_machines(arguments: list[str], rank: str, others: list[str], log: Path) -> int:
    """scripts/train.py, in process `rank` with other arguments; what each says goes to `log` and its rank."""
    own = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    os.dup2(os.open(f"{log}{own}", os.O_WRONLY | os.O_CREAT), 2)
    return two_processes.whole([*arguments, *(others if own == rank else [])])


def patience() -> int:
    """The hours that the processes of a training wait for each other."""
    sys.path.insert(0, str(two_processes.ROOT / "scripts"))
    import_module("train").make_accelerator("run")
    backend = torch.distributed.group.WORLD._get_backend(PartialState().device)
    return backend.options._timeout // timedelta(hours=1)


def test_gradients_travel_with_the_last_micro_batch_of_a_window_alone(config: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"gradient_accumulation_steps": 3, "checkpoint_every": 4}
    processes.run_group(two_processes.train_counting, config.parent / "pictures", tmp_path / "run", options)
    exchanges = json.loads((tmp_path / "run.exchanges").read_text())

    assert len(exchanges) >= 4
    assert set(exchanges) == {2}


def test_with_dropout_in_the_text_encoder_two_processes_resume_bit_for_bit(config: Path, tmp_path: Path) -> None:
    pictures, run = config.parent / "pictures", tmp_path / "run"
    processes.run_group(two_processes.train, pictures, run, OPTIONS)
    resumed = tmp_path / "resumed"
    shutil.copytree(run, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-000004")
    processes.run_group(two_processes.train, pictures, resumed, OPTIONS | {"resume": "latest"})

    for file in ("model", "ema", "optimizer"):
        ours, theirs = (load_file(each / f"checkpoints/step-000004/{file}.safetensors") for each in (resumed, run))
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_a_signal_to_one_process_ends_both_at_the_same_step_with_a_code_of_its_own(
    config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = ["--config", str(config), "--train.batch_size", "4", "--train.output_dir", str(run)]

    assert group_codes(two_processes.signalled, arguments) == [75, 75]
    assert (run / "checkpoints" / "step-000002" / "manifest.json").exists()

    processes.run_group(two_processes.whole, [*arguments, "--train.resume", "latest"])
    assert len((run / "logs" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_process_that_cannot_save_does_not_leave_the_other_waiting(config: Path, tmp_path: Path) -> None:
    arguments = ["--config", str(config), "--train.batch_size", "4", "--train.output_dir", str(tmp_path / "run")]

    codes = group_codes(two_processes.full_disk, [*arguments, "--train.checkpoint_every", "2"])
    assert codes[0] == 2
    assert codes[1] not in (0, None)


def test_a_process_that_fails_alone_says_why(config: Path, tmp_path: Path) -> None:
    arguments = ["--config", str(config), "--train.batch_size", "4", "--train.output_dir", str(tmp_path / "run")]

    codes = group_codes(two_processes.bad_picture, arguments, tmp_path / "stderr")
    assert codes[1] == 2
    assert codes[0] not in (0, None)
    assert "error: process 1: 17.png cannot be read" in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize(
    ("rank", "others", "message"),
    [
        ("1", ["--data.path", "nowhere"], "nowhere"),
        ("0", ["--data.path", "nowhere"], "nowhere"),
        ("1", ["--train.output_dir", "/proc/x/y"], "train.output_dir /proc/x/y cannot be written"),
    ],
)
def test_what_one_machine_lacks_is_told_on_both_and_ends_both(
    config: Path, tmp_path: Path, rank: str, others: list[str], message: str
) -> None:
    arguments = ["--config", str(config), "--train.batch_size", "4", "--train.output_dir", str(tmp_path / "run")]

    assert group_codes(on_two_machines, arguments, rank, others, tmp_path / "said") == [2, 2]
    for own in ("0", "1"):
        said = (tmp_path / f"said{own}").read_text().splitlines()
        (error,) = (line for line in said if line.startswith("error: "))
        assert message in error
        assert error.startswith(f"error: process {rank}: ") == (own != rank)
        assert not any("Traceback" in line for line in said)


def test_a_large_data_set_may_be_read_for_hours_while_the_others_wait() -> None:
    assert group_codes(patience) == [24, 24]


def test_a_grid_and_a_validation_that_a_kill_prevented_come_when_the_run_goes_on(config: Path, tmp_path: Path) -> None:
    pictures, straight, killed = config.parent / "pictures", tmp_path / "straight", tmp_path / "killed"
    options = OPTIONS | {"sample_every": 2, "sample_prompts": ("red thing",), "validate_every": 2}
    processes.run_group(two_processes.train, pictures, straight, options, size=1)
    shutil.copytree(straight, killed)
    shutil.rmtree(killed / "checkpoints" / "step-000004")
    (killed / "samples" / "step-000002.png").write_bytes(b"half a grid")
    (killed / "logs" / "validation.jsonl").unlink()
    processes.run_group(two_processes.train, pictures, killed, options | {"resume": "latest"}, size=1)

    for name in ("samples/step-000002.png", "samples/step-000004.png", "logs/validation.jsonl"):
        assert (killed / name).read_bytes() == (straight / name).read_bytes()
