import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_the_attention_benchmark_runs_and_has_a_row_per_layout_and_pass() -> None:
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), "attention", "--quick"]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"^ 128    4  (contiguous|channels_last) +(forward\+?\w*)(?: +[\d.]+){3,} \([\d.]+\.\.[\d.]+\) \w+$",
        done.stdout,
        re.MULTILINE,
    )
    assert rows == [
        (layout, name) for layout in ("contiguous", "channels_last") for name in ("forward", "forward+backward")
    ]
    assert re.search(r"^median ratio [\d.]+, worst [\d.]+$", done.stdout, re.MULTILINE)


def test_the_memory_of_attention_is_compared_with_the_linear_floor() -> None:
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), "attention", "--memory", "--quick"]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "C side  layout        pass                 floor        ours" in done.stdout
    floors = re.findall(r"^ 128    4  \w+ +forward +([\d.]+)", done.stdout, re.MULTILINE)
    assert floors == ["10.0", "10.0"]  # 5 numbers of 4 bytes for each of 4096 pixels and 128 channels


def test_a_configuration_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), "train", "--config", str(tmp_path / "absent.yaml")]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "absent.yaml" in done.stderr


@pytest.mark.usefixtures("scripts_on_path")
def test_products_are_counted_forward_and_backward_with_their_flop() -> None:
    from _measure import ProductRecorder

    x = torch.randn(2, 3, 5, 7, requires_grad=True)
    kernel = torch.randn(11, 3, 3, 3, requires_grad=True)
    a, b = torch.randn(5, 7), torch.randn(7, 13)

    with ProductRecorder() as recorder:
        F.conv2d(x, kernel, padding=1).sum().backward()
        for _ in range(2):
            a @ b

    convolution = 2 * (2 * 5 * 7) * 11 * (3 * 3 * 3)  # multiply and add, per output element and weight it sees
    assert recorder.flop == 3 * convolution + 2 * (2 * 5 * 7 * 13)  # backward: for the input and for the weight
    assert sorted(recorder.products.values()) == [1, 1, 2]
    assert recorder.seconds_alone() > 0


@pytest.mark.usefixtures("scripts_on_path")
def test_a_product_is_timed_in_the_layout_it_ran_in() -> None:
    from _measure import ProductRecorder

    x = torch.randn(2, 3, 5, 7).contiguous(memory_format=torch.channels_last)

    with ProductRecorder() as recorder:
        F.conv2d(x, torch.randn(11, 3, 1, 1))
    remade = next(iter(recorder.products)).arguments[0].new()

    assert remade.shape == x.shape and remade.stride() == x.stride()


TINY = """
data: {path: none, caption_dropout: 0.1}
text_encoder: {class_path: unet_attn.text_encoder.TextEncoder, init_args: {dim: 8, depth: 1, heads: 2}}
tokenizer: {vocab_size: 300, max_length: 8}
unet: {in_channels: 1, block_channels: [8], layers_per_block: 1, attention_levels: [], dim_head: 4, patch_size: 8}
scheduler: {class_path: diffusers.FlowMatchEulerDiscreteScheduler, init_args: {}}
objective: {prediction_type: flow}
train: {output_dir: none, optimizer: adamw, checkpoint_every: 1000}
"""


@pytest.mark.usefixtures("scripts_on_path")
def test_the_wait_for_data_is_measured_in_memory_from_files_and_in_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import benchmark

    (tmp_path / "tiny.yaml").write_text(TINY)
    small = ["--batch_size", "3", "--steps", "2", "--checked", "7"]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "data", "--config", str(tmp_path / "tiny.yaml"), *small])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    assert benchmark.main() == 0

    printed = capsys.readouterr().out
    waits = re.findall(r"  (.*): [\d.]+ % of a step is waiting for data \([\d.]+ of \d+ ms\)$", printed, re.MULTILINE)
    assert waits == ["32 px held in memory", "128 px from PNG files, 2 workers"]
    assert re.search(r"checking 7 PNG files of 64 px: \d+ pictures/s, \d+ per core$", printed, re.MULTILINE)
    assert not (tmp_path / "cache").exists(), "the user's cache is left alone"


@pytest.mark.usefixtures("scripts_on_path")
def test_training_is_told_by_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import benchmark

    (tmp_path / "tiny.yaml").write_text(TINY)
    small = ["--batch_size", "4", "--steps", "3"]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "train", "--config", str(tmp_path / "tiny.yaml"), *small])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    assert benchmark.main() == 0

    printed = capsys.readouterr().out
    assert "training tiny.yaml, batch 4, median of 3 steps" in printed
    beside = re.search(r"beside forward, backward and optimizer: ([\d.]+) % of a step; a checkpoint: [\d.]+ s", printed)
    assert 0 < float(beside[1]) < 100


@pytest.mark.usefixtures("scripts_on_path")
def test_a_wait_is_a_share_of_the_whole_of_the_steps() -> None:
    from _data_wait import TimedBatches, Waits

    assert Waits([1.0, 0.0], [2.0, 3.0]).share == 0.2
    batches = TimedBatches(iter([{"a": 1}, {"a": 2}]))
    assert [batch["a"] for batch in batches] == [1, 2] and len(batches.seconds) == 2


@pytest.mark.usefixtures("scripts_on_path")
def test_a_senseless_count_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import benchmark

    monkeypatch.setattr(sys, "argv", ["benchmark.py", "data", "--checked", "0"])

    assert benchmark.main() == 2
    assert capsys.readouterr().err == "error: --checked must be at least 1, got 0\n"


@pytest.mark.usefixtures("scripts_on_path")
def test_the_files_are_read_from_disk_although_they_would_fit_into_memory(tmp_path: Path) -> None:
    from _data_wait import nothing_held, png_files

    from unet_attn.data import CaptionedImages, DataOptions

    options = DataOptions(path=str(png_files(tmp_path / "in", 3, 13)), resolution=13)
    with nothing_held():
        assert not CaptionedImages(options).in_memory
    assert CaptionedImages(options).in_memory
