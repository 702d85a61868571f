"""What is refused of a training's options before data is read."""

import math
import os
from pathlib import Path

import pytest

from unet_attn import checkpoint
from unet_attn.checkpoint import save_checkpoint
from unet_attn.options import TrainOptions, check_config_files, check_start, check_unchanged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set train.max_steps or train.max_minutes"),
        ({"max_steps": 0}, "train.max_steps must be above 0 and finite, got 0"),
        ({"max_minutes": -1.0}, "train.max_minutes must be above 0 and finite, got -1.0"),
        ({"max_minutes": math.nan}, "train.max_minutes must be above 0 and finite, got nan"),
        ({"max_steps": 1, "learning_rate": math.nan}, "train.learning_rate must be above 0 and finite, got nan"),
        ({"max_steps": 1, "max_grad_norm": math.inf}, "train.max_grad_norm must be above 0 and finite, got inf"),
        ({"max_steps": 1, "seed": 2**63}, r"train.seed must be at least 0 and below 2\^63"),
        ({"max_steps": 1, "ema_decay": 1.0}, "train.ema_decay must be at least 0 and below 1, got 1.0"),
        ({"max_steps": 1, "cooldown_fraction": 1.5}, r"train.cooldown_fraction must be in \[0, 1\], got 1.5"),
        ({"max_steps": 1, "warmup_steps": -1}, r"train.warmup_steps must be at least 0 and below 2\^63, got -1"),
    ],
)
def test_senseless_options_are_refused_by_name(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(output_dir="run", **options)


def start(folder: Path, **options: object) -> Path | None:
    return check_start(TrainOptions(output_dir=str(folder), max_steps=1, **options), num_processes=2)


def test_a_fresh_run_may_start_in_an_absent_or_empty_folder(tmp_path: Path) -> None:
    assert start(tmp_path) is None
    assert start(tmp_path / "new") is None
    assert not (tmp_path / "new").exists()


def test_a_start_that_would_overwrite_or_cannot_resume_is_refused(tmp_path: Path) -> None:
    first, second = (save_checkpoint(tmp_path / "checkpoints", step, tensors={}, state={}) for step in (1, 2))

    with pytest.raises(ValueError, match=r"already holds files: continue the run there with --train.resume latest"):
        start(tmp_path)
    with pytest.raises(ValueError, match=f"{second} is later than {first}"):
        start(tmp_path, resume=str(first))
    with pytest.raises(ValueError, match="no run to resume in"):
        start(tmp_path / "new", resume="latest")
    with pytest.raises(ValueError, match="absent cannot be used: there is no such folder"):
        start(tmp_path, resume=str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"holds checkpoints and is none: give .* --train.resume latest, or"):
        start(tmp_path / "branch", resume=str(tmp_path / "checkpoints"))
    with pytest.raises(ValueError, match=r"train.resume is empty: give latest, the path of a checkpoint, or null"):
        start(tmp_path, resume="")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for folder in (tmp_path / "link", tmp_path / "link" / "run"):
        with pytest.raises(ValueError, match=f"{folder} cannot be made: {tmp_path}/link is a link to nothing"):
            start(folder)
    with pytest.raises(ValueError, match="batch size 7 cannot be split evenly over 2"):
        start(tmp_path / "new", batch_size=7)
    assert start(tmp_path, resume="latest") == second
    assert start(tmp_path / "branch", resume=str(first)) == first


def test_the_home_folder_is_meant_in_every_path(scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    train, config = scripts("train"), Path(__file__).parent.parent / "configs" / "icons.yaml"
    keys = ("data.path", "train.output_dir", "train.resume", "consistency.start", "text_encoder.init_args.path")
    encoder = "--text_encoder=unet_attn.text_encoder.PretrainedText"
    given = ["--config", str(config), encoder, *(f"--{key}=~/here" for key in keys), "--data.text_column=~/x"]
    monkeypatch.setenv("HOME", "/home/me")
    found = train.expand_homes(train.make_parser().parse_args(given))

    assert [found[key] for key in keys] == ["/home/me/here"] * len(keys)
    assert found.data.text_column == "~/x"
    assert train.expand_homes(train.make_parser().parse_args(given[:2])).text_encoder.init_args.get("path") is None


def test_the_try_whether_a_folder_can_be_written_is_seen_by_no_other_process(tmp_path: Path) -> None:
    os.utime(tmp_path, (1, 1))

    assert start(tmp_path) is None
    # an entry, however short it was there, would have changed the folder's time, and been another process's "files"
    assert tmp_path.stat().st_mtime == 1


@pytest.mark.parametrize("resume", ["latest", "step-000002"])
def test_a_start_reads_the_checkpoint_that_it_resumes_once(tmp_path: Path, monkeypatch, resume: str) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path / "checkpoints", step, tensors={}, state={})
    read, real = [], checkpoint._hash
    monkeypatch.setattr(checkpoint, "_hash", lambda file: read.append(file) or real(file))
    chosen = tmp_path / "checkpoints" / "step-000002"

    assert start(tmp_path, resume=resume if resume == "latest" else str(chosen)) == chosen
    assert read == [chosen / "state.json"]


def test_a_text_models_settings_may_be_written_otherwise_by_another_release_of_its_library(tmp_path: Path) -> None:
    then = {"text_encoder.path": "models/e5", "text_encoder.model_config": {"transformers_version": "5.1.0"}}
    now = then | {"text_encoder.model_config": {"transformers_version": "5.2.0", "new": None}}

    check_unchanged(tmp_path, then, now)
    with pytest.raises(ValueError, match=r"was trained with text_encoder.path models/e5, but it is models/e6 now"):
        check_unchanged(tmp_path, then, now | {"text_encoder.path": "models/e6"})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train: 5", "train must be a section with keys of its own, got 5"),
        ("unet: [8, 16]", r"unet must be a section with keys of its own, got \[8, 16\]"),
        ("data: [unclosed", "is no YAML"),
        ("", "must have sections such as data, unet"),
        ("- data", "must have sections"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_its_name(tmp_path: Path, text: str, told: str) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("train: {max_steps: 1}\nscheduler: diffusers.DDIMScheduler\ntext_encoder: null\n")
    bad.write_text(text)
    check_config_files(["--config", str(good), "--train.max_steps", "5", "--config", str(tmp_path / "absent.yaml")])
    for given in (["--config", str(good), "--config", str(bad)], [f"--config={bad}"]):
        with pytest.raises(ValueError, match=rf"bad\.yaml.*{told}"):
            check_config_files(given)


def test_a_folder_without_a_checkpoint_is_not_said_to_be_one_to_go_on_with(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    with pytest.raises(ValueError, match="already holds files: no run there can be continued, so remove it"):
        start(run)
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"already holds files: continue the run there with --train.resume latest"):
        start(run)
    with pytest.raises(
        ValueError, match=r"run is a run and no checkpoint: give --train.output_dir \S+run --train.resume latest"
    ):
        start(run, resume=str(run))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("text_encoder: {class_path: unet_attn.text_encoder.PretrainedText}", '"text_encoder"'),
        ("text_encoder: {class_path: unet_attn.text_encoder.PretrainedText, init_args: null}", '"text_encoder"'),
        ("train: {batch_size: x}", '"train.batch_size"'),
        ("train: {batchsize: 3}", "'batchsize'"),
        ("train: {seed: -1}", "train.seed"),
        ("unet: {patch_size: 0}", "unet.patch_size"),
        ("unet: {block_channels: []}", "unet.block_channels"),
        ("data: {path: 5}", '"data.path"'),
    ],
)
def test_what_training_would_refuse_of_its_file_inspect_data_refuses_in_one_line(
    scripts, tmp_path: Path, capsys, text: str, key: str
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(text)
    assert scripts("inspect_data").main([str(tmp_path), "--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and key in error and error.count("\n") == 1
