"""scripts/train.py as it is used: real launches of one and two processes, the configs, and refused starts."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from jsonargparse import Namespace
from tiny_config import write_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast, RobertaConfig, RobertaModel, T5Config, T5Model

from unet_attn.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "train.py"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
TABLE = {
    "data": {
        "path",
        "resolution",
        "caption_dropout",
        "caption_extension",
        "horizontal_flip",
        "on_error",
        "num_workers",
    },
    "train": {
        "output_dir",
        "seed",
        "batch_size",
        "gradient_accumulation_steps",
        "max_steps",
        "max_minutes",
        "learning_rate",
        "warmup_steps",
        "ema_decay",
        "checkpoint_every",
        "keep_checkpoints",
        "resume",
        "sample_every",
        "sample_prompts",
    },
    "scheduler": {"class_path", "init_args"},
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module, so that most tests need no process of their own."""
    spec = importlib.util.spec_from_file_location("train_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A tiny configuration over thirteen tiny pictures."""
    return write_config(
        tmp_path,
        max_steps=6,
        warmup_steps=0,
        checkpoint_every=2,
        sample_every=4,
        sample_prompts=["red thing", "blue thing"],
    )


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]


def launched(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(argument) for argument in arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)


def test_two_processes_train_the_run_of_one(script: ModuleType, config: Path, tmp_path: Path) -> None:
    two = tmp_path / "two"
    done = launched(
        *LAUNCH, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0",
        SCRIPT, "--config", config, "--train.output_dir", two, "--train.keep_checkpoints", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert script.main(["--config", str(config)]) == 0

    assert done.stdout.splitlines()[0] == "training on 2 processes, cpu, fp32"
    one = metrics(tmp_path / "run")
    assert len(one) == 6
    for got, expected in zip(metrics(two), one, strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert (got["lr"], got["pictures_seen"]) == (expected["lr"], expected["pictures_seen"])
    assert sorted(path.name for path in (two / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    assert sorted(path.name for path in (two / "samples").iterdir()) == ["step-000004.png", "step-000006.png"]
    assert "Traceback" not in done.stderr


def test_a_launch_that_would_silently_start_one_process_is_refused(config: Path, tmp_path: Path) -> None:
    done = launched(*LAUNCH, "--cpu", "--num_processes", "2", SCRIPT, "--config", config)

    assert done.returncode != 0
    assert (
        "starts one process whatever was asked for: use accelerate launch --multi_gpu --num_processes 2" in done.stderr
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "2 processes were launched, but Accelerate sees 1"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP is not supported on a CPU"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed is not supported"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "set train.gradient_accumulation_steps rather"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "fp16 needs a GPU"),
    ],
)
def test_a_launch_that_would_silently_run_otherwise_is_refused(
    script: ModuleType, config: Path, tmp_path: Path, monkeypatch, capsys, variables: dict[str, str], message: str
) -> None:
    if "WORLD_SIZE" in variables:
        # what a process sees that thinks it is alone; a real group would wait here for its second member
        monkeypatch.setattr(script, "Accelerator", lambda **options: type("Alone", (), {"num_processes": 1})())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert script.main(["--config", str(config)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_resolved_config_repeats_the_run(script: ModuleType, config: Path, tmp_path: Path) -> None:
    assert script.main(["--config", str(config), "--train.max_steps", "2", "--train.sample_every", "null"]) == 0
    resolved = tmp_path / "run" / "config.yaml"
    assert script.main(["--config", str(resolved), "--train.output_dir", str(tmp_path / "again")]) == 0

    assert [line["loss"] for line in metrics(tmp_path / "again")] == [
        line["loss"] for line in metrics(tmp_path / "run")
    ]
    assert yaml.safe_load(resolved.read_text())["train"]["sample_every"] is None
    assert not (tmp_path / "again" / "samples").exists()


def test_resuming_takes_the_tokenizer_of_the_checkpoint(script: ModuleType, config: Path, tmp_path: Path) -> None:
    assert script.main(["--config", str(config), "--train.max_steps", "2"]) == 0
    for caption in (tmp_path / "my pictures").glob("*.txt"):
        caption.write_text("quite other words than those before, and more of them")
    assert script.main(["--config", str(config), "--train.max_steps", "3", "--train.resume", "latest"]) == 0

    saved = [
        tmp_path / "run" / where / "tokenizer.json" for where in ("tokenizer", "checkpoints/step-000002/tokenizer")
    ]
    assert saved[0].read_text() == saved[1].read_text()
    assert len(metrics(tmp_path / "run")) == 3


def test_a_text_model_in_half_precision_trains_and_the_captions_that_it_cuts_are_counted(
    script: ModuleType, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = train_tokenizer(["red thing"], vocab_size=300, max_length=16)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shape = RobertaConfig(max_position_embeddings=6, **ids, **sizes)
    RobertaModel(shape).to(torch.bfloat16).save_pretrained(tmp_path / "text")
    tokenizer.save_pretrained(tmp_path / "text")
    values = yaml.safe_load(config.read_text())
    values["text_encoder"] = {
        "class_path": "unet_attn.text_encoder.PretrainedText",
        "init_args": {"path": str(tmp_path / "text")},
    }
    config.write_text(yaml.safe_dump(values))

    assert script.main(["--config", str(config), "--train.max_steps", "2"]) == 0

    assert (
        "13 captions are longer than 5 tokens and lose their ends (what the text model holds)"
        in capsys.readouterr().out
    )


def test_text_encoder_null_trains_without_captions(script: ModuleType, config: Path, tmp_path: Path) -> None:
    for caption in (tmp_path / "my pictures").glob("*.txt"):
        caption.unlink()
    options = ["--text_encoder", "null", "--train.sample_prompts", "[]", "--train.max_steps", "1"]

    assert script.main(["--config", str(config), *options]) == 0
    assert not (tmp_path / "run" / "text_encoder").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train.nonsense", "3"], "--train.nonsense"),
        (["--train.seed", "x"], 'Parser key "train.seed"'),
        (["--unet.block_channels", "foo"], 'Parser key "unet.block_channels"'),
        (["--train.optimizer", "sgd"], 'Parser key "train.optimizer"'),
        (["--scheduler.class_path", "diffusers.NoScheduler"], "module diffusers has no attribute NoScheduler"),
        (["--train.max_steps", "null"], "set train.max_steps or train.max_minutes"),
        (["--train.batch_size", "14"], "has 13 pictures, fewer than train.batch_size 14"),
        (["--train.batch_size", "3", "--train.gradient_accumulation_steps", "2"], "must be a multiple of 2"),
        (["--data.path", "nowhere"], "nowhere"),
        (["--unet.attention_levels", "[2]"], "unet.attention_levels must lie in 0..1"),
        (["--unet.block_channels", "[12, 16]"], "unet.block_channels must be multiples of 8"),
        (["--text_encoder.init_args.dim", "0"], "text_encoder.dim must be at least 1, got 0"),
        (["--data.resolution", "9"], "must be a multiple of 2"),
        (["--objective.prediction_type", "epsilon"], "FlowMatchEulerDiscreteScheduler"),
        (["--train.resume", "latest"], "no run to resume in"),
        (["--train.resume=~/absent"], f"checkpoint {Path.home() / 'absent'} cannot be used: there is no such folder"),
        (["--text_encoder", "null"], "train.sample_prompts need a text_encoder"),
        (["--train.output_dir", "/proc/x/y"], "train.output_dir /proc/x/y cannot be written"),
        (["--train.seed", "-1"], "train.seed must be at least 0 and below 2^63, got -1"),
        (["--train.trackers", "[aim]"], "train.trackers has 'aim', which is not installed: pip install aim"),
        (["--data.background", "notacolour"], "data.background must be a colour"),
        (["--train.max_minutes", ".nan"], "train.max_minutes must be above 0 and finite, got nan"),
        (["--data.validation_share", "1.5"], "data.validation_share must be at least 0 and below 1, got 1.5"),
        (
            ["--text_encoder", "unet_attn.text_encoder.PretrainedText", "--text_encoder.path", "/nope"],
            "text_encoder.path /nope: there is no such folder",
        ),
    ],
)
def test_a_refused_start_is_one_line_and_leaves_no_run_folder(
    script: ModuleType, config: Path, tmp_path: Path, capsys, options: list[str], message: str
) -> None:
    assert script.main(["--config", str(config), *options]) == 2

    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert message in error[0]
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_of_another_network_is_refused_before_data_is_read(
    script: ModuleType, config: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    assert script.main(["--config", str(config), "--train.max_steps", "1"]) == 0
    monkeypatch.setattr(script, "open_data", None)  # calling it would raise a TypeError

    resumed = ["--config", str(config), "--train.resume", "latest"]
    assert script.main([*resumed, "--unet.dim_head", "16"]) == 2
    assert "was trained with unet.dim_head" in capsys.readouterr().err
    assert script.main([*resumed, "--train.batch_size", "3"]) == 2
    assert "was trained with train.batch_size" in capsys.readouterr().err
    assert script.main([*resumed, "--data.validation_share", "0.5"]) == 2
    assert "was trained with data.validation_share 0.0, but it is 0.5 now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--text_encoder.init_args.heads", "5", "text_encoder.heads must divide text_encoder.dim"),
        ("--text_encoder.init_args.depth", "0", "text_encoder.depth must be at least 1, got 0"),
        ("--tokenizer.vocab_size", "100", "tokenizer.vocab_size must be at least 259, got 100"),
        ("--tokenizer.max_length", "2", "tokenizer.max_length must be at least 3, got 2"),
    ],
)
def test_what_is_wrong_with_the_text_is_told_before_data_is_read(
    script: ModuleType, config: Path, capsys, monkeypatch, option: str, value: str, message: str
) -> None:
    monkeypatch.setattr(script, "open_data", None)  # calling it would raise a TypeError
    assert script.main(["--config", str(config), option, value]) == 2
    assert message in capsys.readouterr().err


def test_a_run_folder_among_the_pictures_is_refused(script: ModuleType, config: Path, tmp_path: Path, capsys) -> None:
    inside = tmp_path / "my pictures" / "run"
    assert script.main(["--config", str(config), "--train.output_dir", str(inside)]) == 2
    assert "lies in data.path" in capsys.readouterr().err
    assert not inside.exists()


def test_a_folder_with_another_run_is_left_as_it_is(script: ModuleType, config: Path, tmp_path: Path, capsys) -> None:
    assert script.main(["--config", str(config), "--train.max_steps", "1"]) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}

    assert script.main(["--config", str(config)]) == 2

    assert "continue the run there with --train.resume latest" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


FINISH = ROOT / "configs" / "few_steps.yaml"  # laid over another
COMPLETE = sorted(set((ROOT / "configs").glob("*.yaml")) - {FINISH})


@pytest.mark.parametrize("path", COMPLETE, ids=lambda path: path.stem)
def test_every_shipped_config_parses_and_holds_the_keys_of_the_table(script: ModuleType, path: Path) -> None:
    script.make_parser().parse_args(["--config", str(path)])
    values = yaml.safe_load(path.read_text())

    assert [(section, key) for section, keys in TABLE.items() for key in keys if key not in values[section]] == []
    assert values["data"]["on_error"] == "fail"
    assert {"text_encoder", "unet", "tokenizer", "objective"} <= values.keys()


def test_the_finish_of_few_steps_changes_what_it_says_of_a_config_and_nothing_else(script: ModuleType) -> None:
    def flat(*paths: Path) -> dict[str, object]:
        given = [part for path in paths for part in ("--config", str(path))]
        return vars(script.make_parser().parse_args(given).as_flat()) | {"config": None}

    before, after = flat(ROOT / "configs" / "icons.yaml"), flat(ROOT / "configs" / "icons.yaml", FINISH)
    said = {f"{section}.{key}" for section, keys in yaml.safe_load(FINISH.read_text()).items() for key in keys}

    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    # the scheduler's own defaults come with its class
    assert {key for key in changed if not key.startswith("scheduler.init_args.")} <= said
    assert {"data.caption_dropout", "scheduler.class_path", "train.ema_decay", "train.learning_rate"} <= changed
    assert after["consistency.start"] == "runs/mine"


def test_too_small_a_gpu_is_told_with_the_way_out(script: ModuleType, config: Path, monkeypatch, capsys) -> None:
    def too_large(trainer: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 8.")

    monkeypatch.setattr(script.Trainer, "_train_step", too_large)

    assert script.main(["--config", str(config)]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: CUDA out of memory: raise train.gradient_accumulation_steps, or lower")


def test_a_signal_ends_the_process_with_a_code_of_its_own(
    script: ModuleType, config: Path, monkeypatch, capsys
) -> None:
    class Interrupted(script.Trainer):
        def _train_step(self) -> None:
            if self.step == 1:
                os.kill(os.getpid(), 15)
            super()._train_step()

    monkeypatch.setattr(script, "Trainer", Interrupted)

    assert script.main(["--config", str(config)]) == 75
    assert "stopped by a signal after step 2; go on with --train.resume latest" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_quickstart_removes_what_it_left_and_no_other_folder(tmp_path: Path) -> None:
    for tool in ("python", "accelerate"):
        (tmp_path / tool).symlink_to(shutil.which("true"))
    (tmp_path / "metadata.jsonl").touch()
    (tmp_path / "installed").touch()
    mine, killed = tmp_path / "my folder", tmp_path / "killed"
    for folder, file in ((mine, "thesis.txt"), (killed, "config.yaml")):
        folder.mkdir()
        (folder / file).touch()

    def quickstart(run: Path) -> subprocess.CompletedProcess[str]:
        places = [f"BIN={tmp_path}", f"DATA={tmp_path}", f"INSTALLED={tmp_path / 'installed'}"]
        return launched("make", "--silent", "quickstart", f"RUN={run}", *places)

    refused = quickstart(mine)
    assert refused.returncode != 0
    assert refused.stderr.splitlines()[0] == f"{mine} is no run, as it has no config.yaml: choose another RUN"
    assert (mine / "thesis.txt").exists()
    assert quickstart(killed).returncode == 0  # a run that was killed before its first checkpoint starts again
    assert not killed.exists()
    assert quickstart(tmp_path / "new").returncode == 0


def test_a_text_model_whose_tokenizer_has_no_vocabulary_file_is_resumed(
    script: ModuleType, config: Path, tmp_path: Path, capsys
) -> None:
    tokenizer = ByT5Tokenizer()
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    T5Model(T5Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "text")
    tokenizer.save_pretrained(tmp_path / "text")
    values = yaml.safe_load(config.read_text())
    values["text_encoder"] = {
        "class_path": "unet_attn.text_encoder.PretrainedText",
        "init_args": {"path": str(tmp_path / "text")},
    }
    values["train"]["sample_every"] = None
    config.write_text(yaml.safe_dump(values))

    assert script.main(["--config", str(config), "--train.max_steps", "1"]) == 0
    assert not (tmp_path / "run" / "checkpoints" / "step-000001" / "tokenizer" / "tokenizer.json").exists()
    assert script.main(["--config", str(config), "--train.max_steps", "2", "--train.resume", "latest"]) == 0, (
        capsys.readouterr().err
    )
    assert len(metrics(tmp_path / "run")) == 2


def test_a_text_model_without_a_pad_token_fills_up_with_its_end(script: ModuleType) -> None:
    spec = Namespace(init_args=Namespace(path="gpt"))
    config = Namespace(text_encoder=spec, tokenizer=Namespace(max_length=7))
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"end": 0, "a": 1})), eos_token="end")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.AutoTokenizer, "from_pretrained", lambda path, **options: words)
        assert script.make_tokenizer(config, None, None, pretrained=True).pad_token == "end"
