"""Checkpoints are complete or absent."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from unet_attn import checkpoint
from unet_attn.checkpoint import (
    CheckpointError,
    fault,
    find_checkpoint,
    load_checkpoint,
    numbered,
    replace_files,
    save_checkpoint,
)


def save(folder: Path, step: int, *, keep: int | None = None, value: float = 1.0) -> Path:
    tensors = {"model": {"a.weight": torch.full((3, 5), value)}, "ema": {"a.weight": torch.full((3, 5), 2 * value)}}
    return save_checkpoint(folder, step, tensors=tensors, state={"seconds": 1.5}, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 500, value=3.0)
    loaded = load_checkpoint(path)

    assert path.name == "step-000500"
    assert loaded.state == {"format_version": 1, "step": 500, "seconds": 1.5}
    torch.testing.assert_close(loaded.tensors["model"]["a.weight"], torch.full((3, 5), 3.0))
    torch.testing.assert_close(loaded.tensors["ema"]["a.weight"], torch.full((3, 5), 6.0))
    assert names(tmp_path) == ["step-000500"]


def test_tensors_in_any_memory_layout_are_saved(tmp_path: Path) -> None:
    weight = torch.arange(2 * 3 * 5 * 7.0).reshape(2, 3, 5, 7)
    path = save_checkpoint(
        tmp_path, 1, tensors={"model": {"w": weight.to(memory_format=torch.channels_last)}}, state={}
    )

    torch.testing.assert_close(load_checkpoint(path).tensors["model"]["w"], weight, rtol=0, atol=0)


def test_tensors_that_share_memory_are_saved_each_for_itself(tmp_path: Path) -> None:
    weight = torch.arange(35.0).reshape(5, 7)
    group = {"a": weight, "tied": weight, "part": weight[1:3], "turned": weight.T}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, tensors={"model": group}, state={})).tensors["model"]

    torch.testing.assert_close(loaded, group, rtol=0, atol=0)


def test_further_files_are_under_the_manifest(tmp_path: Path) -> None:
    def write_more(folder: Path) -> None:
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "t.json").write_text("abc")

    path = save_checkpoint(tmp_path, 1, tensors={}, state={}, write_more=write_more)
    assert fault(path) is None
    (path / "tokenizer" / "t.json").write_text("abd")

    assert fault(path) == "the contents of tokenizer/t.json are not what was written"


def test_latest_is_numeric_and_ignores_other_names(tmp_path: Path) -> None:
    for step in (9, 10, 1_000_000, 2_000_000):
        save(tmp_path, step)
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-3000000.tmp").mkdir()
    (tmp_path / "step-4000000").write_text("a file")

    assert [path.name for path in numbered(tmp_path)] == ["step-000009", "step-000010", "step-1000000", "step-2000000"]
    assert find_checkpoint(tmp_path, "latest").name == "step-2000000"


def cut_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-20])


def change_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (cut_weights, r"model.safetensors has \d+ bytes where \d+ were written"),
        (change_weights, "the contents of model.safetensors are not what was written"),
        (lambda path: (path / "ema.safetensors").unlink(), "ema.safetensors is missing"),
        (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json, so writing it was interrupted"),
        (lambda path: (path / "manifest.json").write_text("{"), "its manifest.json cannot be read"),
        (lambda path: [file.unlink() for file in path.iterdir()], "it has no manifest.json"),
    ],
)
def test_an_incomplete_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, harm, reason: str) -> None:
    save(tmp_path, 2)
    harm(save(tmp_path, 4))

    with pytest.warns(UserWarning, match=rf"step-000004 is passed over: {reason}"):
        assert find_checkpoint(tmp_path, "latest").name == "step-000002"
    with pytest.raises(CheckpointError, match=rf"step-000004 cannot be used: {reason}"):
        load_checkpoint(tmp_path / "step-000004")


def test_no_checkpoint_at_all_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint in .*: remove .* and start without --train.resume"
    ):
        find_checkpoint(tmp_path / "absent", "latest")


def test_the_limit_keeps_the_newest_and_touches_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "step-best").mkdir()
    for step in (9, 10, 100):
        save(tmp_path, step, keep=2)

    assert names(tmp_path) == ["step-000010", "step-000100", "step-best"]


def test_incomplete_checkpoints_do_not_push_complete_ones_out(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").unlink()
    save(tmp_path, 3, keep=2)

    assert names(tmp_path) == ["step-000001", "step-000003"]


@pytest.mark.parametrize("harm", [cut_weights, lambda path: (path / "ema.safetensors").unlink()])
def test_checkpoints_that_were_damaged_since_do_not_push_good_ones_out(tmp_path: Path, harm) -> None:
    save(tmp_path, 4)
    harm(save(tmp_path, 5))
    save(tmp_path, 6, keep=2)

    assert names(tmp_path) == ["step-000004", "step-000006"]
    assert [fault(path) for path in numbered(tmp_path)] == [None, None]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 4, value=1.0)
    path = save(tmp_path, 4, value=9.0)

    assert load_checkpoint(path).tensors["model"]["a.weight"].max() == 9.0
    assert names(tmp_path) == ["step-000004"]


@pytest.mark.parametrize("writer", ["save_file", "write_json", "_sync"])
def test_a_full_disk_leaves_the_earlier_checkpoints_alone(tmp_path: Path, monkeypatch, writer: str) -> None:
    save(tmp_path, 2)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, writer, full)
    with pytest.raises(
        CheckpointError, match=r"step-000004 could not be written .*No space left.*--train.resume latest"
    ):
        save(tmp_path, 4, keep=1)

    assert names(tmp_path) == ["step-000002"]
    assert fault(tmp_path / "step-000002") is None

    shutil.rmtree(tmp_path / "step-000002")
    with pytest.raises(CheckpointError, match=r"No space left.* before: make room on the disk, .* and start again"):
        save(tmp_path, 4, keep=1)


def test_another_format_is_refused_with_both_versions(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 7)
    path = save(tmp_path, 1)
    monkeypatch.undo()

    with pytest.raises(CheckpointError, match=r"has format_version 7, .* reads 1: install a release that reads 7"):
        load_checkpoint(path)


def test_not_a_number_is_not_written_as_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not JSON compliant.*nothing was complete before: remove"):
        save_checkpoint(tmp_path, 1, tensors={}, state={"seconds": float("nan")})

    assert names(tmp_path) == []


def test_files_are_replaced_and_neighbours_stay(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "old.txt").write_text("old")
    (tmp_path / "index.json").write_text("old")
    (tmp_path / "logs").mkdir()

    def write(folder: Path) -> None:
        (folder / "unet").mkdir()
        (folder / "unet" / "new.txt").write_text("new")
        (folder / "index.json").write_text(json.dumps("new"))

    replace_files(tmp_path, write)

    assert names(tmp_path) == ["index.json", "logs", "unet"]
    assert names(tmp_path / "unet") == ["new.txt"]
    assert (tmp_path / "index.json").read_text() == '"new"'


def test_a_failure_while_files_are_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("old")

    def write(folder: Path) -> None:
        (folder / "index.json").write_text("half")
        raise OSError("disk")

    with pytest.raises(CheckpointError, match=r"could not be written \(disk\).*make room"):
        replace_files(tmp_path, write)

    assert names(tmp_path) == ["index.json"]
    assert (tmp_path / "index.json").read_text() == "old"


def test_remains_of_a_crash_are_in_nobodys_way(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 4), tmp_path / ".step-000004.partial")
    (tmp_path / ".step-000004.old").mkdir()

    assert find_checkpoint(tmp_path, "latest").name == "step-000004"
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-000004"]


def test_what_a_crash_left_of_another_step_goes_with_the_next_save(tmp_path: Path) -> None:
    saved = save(tmp_path, 1)
    for left in (".step-000002.partial", ".step-000003.partial", ".step-000003.old"):
        shutil.copytree(saved, tmp_path / left)
    (tmp_path / ".mine.partial").mkdir()

    save(tmp_path, 4)
    assert names(tmp_path) == [".mine.partial", "step-000001", "step-000004"]


def test_a_checkpoint_that_was_just_checked_is_not_hashed_again(tmp_path: Path, monkeypatch) -> None:
    path = save(tmp_path, 4, value=3.0)
    assert find_checkpoint(tmp_path, str(path)) == path
    monkeypatch.setattr(checkpoint, "_hash", None)  # calling it would raise a TypeError

    assert load_checkpoint(path, checked=True).tensors["model"]["a.weight"].max() == 3.0


def test_a_checkpoint_of_a_path_is_checked_as_the_latest_is(tmp_path: Path) -> None:
    change_weights(save(tmp_path, 4))

    with pytest.raises(CheckpointError, match=r"step-000004 cannot be used: the contents of model.safetensors"):
        find_checkpoint(tmp_path, str(tmp_path / "step-000004"))


def test_a_file_that_the_manifest_does_not_name_is_not_read(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, tensors={"model": {"a": torch.ones(3)}}, state={})
    (path / "stray.safetensors").write_bytes(b"no tensors")

    assert list(load_checkpoint(path).tensors) == ["model"]


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ('{"files": {}}', "its manifest.json lists no files"),
        ('{"files": "x"}', "its manifest.json cannot be read"),
        ('{"files": {"model.safetensors": 3}}', "its manifest.json cannot be read"),
    ],
)
def test_a_manifest_that_vouches_for_nothing_is_a_fault(tmp_path: Path, manifest: str, reason: str) -> None:
    path = save_checkpoint(tmp_path, 1, tensors={"model": {"a": torch.ones(3)}}, state={})
    (path / "manifest.json").write_text(manifest)

    assert fault(path) == reason
