"""configs/accelerate: read as `accelerate launch` reads them, and the one for this machine launched."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))


def launch_arguments(name: str, *options: str) -> argparse.Namespace:
    """What `accelerate launch --config_file configs/accelerate/NAME.yaml OPTIONS scripts/train.py` works with."""
    path = ROOT / "configs" / "accelerate" / f"{name}.yaml"
    given = launch_command_parser().parse_args(["--config_file", str(path), *options, "scripts/train.py"])
    return _validate_launch_command(given)[0]


def test_there_is_a_config_for_each_kind_of_launch() -> None:
    assert [path.stem for path in CONFIGS] == ["cpu", "fsdp2", "multi_gpu", "two_machines"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_knows_every_key(path: Path) -> None:
    config = load_config_from_file(str(path))  # refuses unknown keys, but not those within fsdp_config
    known = vars(launch_command_parser().parse_args(["script"]))

    assert [key for key in config.fsdp_config if key not in known] == []
    assert config.mixed_precision in {"no", "bf16"}  # without its quotes, no would be False
    # every machine of a launch has its own number, which a file that all share cannot hold
    assert "machine_rank" not in yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "kind", "processes", "machines"),
    [
        ("cpu", DistributedType.NO, 1, 1),
        ("multi_gpu", DistributedType.MULTI_GPU, 2, 1),
        ("fsdp2", DistributedType.FSDP, 2, 1),
        ("two_machines", DistributedType.MULTI_GPU, 2, 2),
    ],
)
def test_each_config_launches_what_its_name_says(
    name: str, kind: DistributedType, processes: int, machines: int
) -> None:
    arguments = launch_arguments(name)

    assert (arguments.num_processes, arguments.num_machines) == (processes, machines)
    assert arguments.multi_gpu == (kind == DistributedType.MULTI_GPU)
    assert arguments.use_fsdp == (kind == DistributedType.FSDP)
    assert arguments.use_cpu == (name == "cpu")


def test_options_of_the_command_line_go_before_the_file() -> None:
    arguments = launch_arguments(
        "two_machines", "--num_processes", "6", "--machine_rank", "1", "--main_process_ip", "10.1.2.3"
    )

    assert (arguments.num_processes, arguments.machine_rank, arguments.main_process_port) == (6, 1, 29500)
    environment = prepare_multi_gpu_env(arguments)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert (arguments.nproc_per_node, arguments.nnodes, arguments.node_rank) == ("3", "2", 1)
    assert arguments.rdzv_endpoint == "10.1.2.3:29500"


def test_the_fsdp_config_asks_for_the_second_version_and_the_layers_of_the_u_net() -> None:
    environment = prepare_multi_gpu_env(launch_arguments("fsdp2"))

    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "UNetLayer"
    assert environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"


def test_the_cpu_config_trains(tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    random = np.random.default_rng(0)
    for number in range(5):
        Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text(f"thing {number}")
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", ROOT / "configs/accelerate/cpu.yaml",
        ROOT / "scripts" / "train.py", "--config", ROOT / "configs" / "quickstart.yaml",
        "--data.path", pictures, "--data.resolution", "8", "--unet.block_channels", "[8,16]", "--unet.patch_size", "1",
        "--unet.attention_levels", "[1]", "--unet.dim_head", "8", "--tokenizer.vocab_size", "300",
        "--train.output_dir", tmp_path / "run", "--train.batch_size", "3", "--train.max_steps", "2",
        "--train.sample_every", "null", "--train.sample_prompts", "[]",
    ]  # fmt: skip
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240, cwd=ROOT)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "training on 1 process, cpu, fp32"
    lines = (tmp_path / "run" / "logs" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert "default" not in done.stderr  # Accelerate warns of everything that it had to assume


@pytest.mark.slow
def test_two_hosts_train_the_run_of_one_process() -> None:
    allowed = ["unshare", "--user", "--map-root-user", "--net", "--mount", "ip", "link", "show"]
    if not all(map(shutil.which, ("unshare", "ip"))) or subprocess.run(allowed, capture_output=True).returncode:
        pytest.skip("this machine makes no network namespaces")
    done = subprocess.run([ROOT / "tests/two_hosts.sh", sys.executable], capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("training on 2 processes") == 2
