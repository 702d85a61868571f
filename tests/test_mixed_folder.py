"""A folder as people have them goes through all that a person does with it, and the same files are used everywhere."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from mixed_folder import write_mixed_folder

from unet_attn.judge import Judge, JudgeSize
from unet_attn.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
COPIES = 3  # of the folder: a judge needs a hundred captions to choose among
JUDGE = JudgeSize(image_size=16, patch_size=4, dim=8, depth=1, heads=2, text_dim=8, text_depth=1, embedding_dim=8)


def write_copies(folder: Path) -> tuple[int, int]:
    """The numbers of good and bad pictures; each copy has captions of its own."""
    good = bad = 0
    for number in range(COPIES):
        copy = folder / f"disk {number}"
        mixed = write_mixed_folder(copy)
        for name in mixed.good:
            caption = (copy / name).with_name(f"{Path(name).name.rpartition('.')[0]}.txt")
            caption.write_text(f"{caption.read_text()} of disk {number}")
        good, bad = good + len(mixed.good), bad + len(mixed.bad)
    return good, bad


def write_config(path: Path, data: Path) -> Path:
    values = {
        "data": {"path": str(data), "resolution": 16, "on_error": "skip"},
        "text_encoder": {
            "class_path": "unet_attn.text_encoder.TextEncoder",
            "init_args": {"dim": 8, "depth": 1, "heads": 2},
        },
        "tokenizer": {"vocab_size": 300, "max_length": 16},
        "unet": {"in_channels": 3, "block_channels": [8, 8], "attention_levels": [1], "dim_head": 4, "patch_size": 2},
        "scheduler": {"class_path": "diffusers.FlowMatchEulerDiscreteScheduler", "init_args": {}},
        "train": {"output_dir": str(path.parent / "run"), "batch_size": 7, "max_steps": 3, "sample_every": None},
    }
    path.write_text(yaml.safe_dump(values))
    return path


def write_judge(folder: Path) -> Path:
    judge = Judge(JUDGE, train_tokenizer(["picture number of disk"], vocab_size=300, max_length=16))
    judge.record = {"held_out_agreement": 0.5}
    judge.save(folder)
    return folder


def test_inspection_training_and_evaluation_use_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    good, bad = write_copies(tmp_path / "mine")
    config, judge = write_config(tmp_path / "config.yaml", tmp_path / "mine"), write_judge(tmp_path / "judge")

    assert import_module("inspect_data").main(["--config", str(config), "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    assert (inspected["pictures"], inspected["captions"]["count"], len(inspected["faults"])) == (good, good, bad)

    assert import_module("train").main(["--config", str(config)]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^{good} pictures in .*; captions: \.txt files$", printed, re.MULTILINE)
    assert re.search(rf"^{bad} skipped: ", printed, re.MULTILINE)
    skipped = (tmp_path / "run/skipped.tsv").read_text(encoding="utf-8").splitlines()[1:]
    assert {line.split("\t")[1] for line in skipped} == {fault["path"] for fault in inspected["faults"]}

    measured = ["--judge", judge, "--features", "judge", "--num_pictures", 64, "--steps", 1]
    command = ["evaluate.py", tmp_path / "run", "--data.path", tmp_path / "mine", *measured]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    assert import_module("evaluate").main() == 0
    report = json.loads((tmp_path / "run/evaluation.json").read_text(encoding="utf-8"))
    assert report["copies"]["training_pictures"] == good and report["loss"]["on_training_data"] is True
