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
