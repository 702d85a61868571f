"""benchmark.py quality: the clock stands while weights are kept, what is drawn when, and what is left behind."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from quality_data import quality_folder

from unet_attn import clock as clock_module
from unet_attn import extractors
from unet_attn.clock import RunClock
from unet_attn.judge import Judge, JudgeFeatures

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
MINUTES = 0.05
TICK = 0.02  # seconds that pass whenever the clock is read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quality_folder(tmp_path_factory.mktemp("quality"))


# ------------------------------------------------------------------------------------------------------------ the clock


def test_the_clock_stands_while_weights_are_kept(
    scripts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = scripts("_quality_entry")
    now = [100.0]
    monkeypatch.setattr(clock_module, "monotonic", lambda: now[0])
    monkeypatch.setattr(entry, "monotonic", lambda: now[0])
    task = entry.Task("ddpm", "", "", 1.0, [0.25, 0.5, 1.0], list(range(67)), 65, 5, None)

    def save(path: Path) -> None:
        now[0] += 1000.0
        path.write_text("weights")

    kept = entry.Kept(task, tmp_path, save)
    clock = RunClock(max_steps=None, max_minutes=1.0)
    clock.start()
    for step in range(1, 7):
        now[0] += 10.0
        kept.look(clock, step)
    kept.last(clock, 6)

    assert clock.seconds() == 60.0 and kept.training_mib > 0
    assert [tuple(place.values()) for place in kept.places] == [
        (0.25, pytest.approx(20 / 60), 2, "weights-0.25"),
        (0.5, 0.5, 3, "weights-0.5"),
        (1.0, 1.0, 6, "weights-1"),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"weights-0.25", "weights-0.5", "weights-1"}
    short = entry.Kept(task, tmp_path, save)
    short.last(clock, 1)
    assert [place["weights"] for place in short.places] == ["weights-1"]


def test_all_is_drawn_at_the_end_and_the_first_by_the_main_sampler_before(
    scripts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry, peer = scripts("_quality_entry"), scripts("_peer")
    now, done = [0.0], []
    monkeypatch.setattr(entry, "monotonic", lambda: now[0])
    task = entry.Task("ddpm", "", "", 1.0, [0.5, 1.0], list(range(67)), 65, 5, None)
    places = [{"moment": m, "minutes": m, "step": int(6 * m), "weights": f"weights-{m:g}"} for m in (0.5, 1.0)]

    def load(weights: Path) -> Callable[..., torch.Tensor]:
        def draw(asked: object, sampler: object, seed: int) -> torch.Tensor:
            now[0] += 1000.0
            done.append((weights.name, len(asked.captions), sampler.steps, seed))
            return torch.zeros(len(asked.captions), 1, 2, 2)

        return draw

    asked = peer.Asked(["a"] * 67, torch.zeros(67, dtype=torch.int64))
    samplers = {"main": peer.Sampler("x", 2, 3.0), "fast": peer.Sampler("x", 1, 3.0)}
    takes = entry.drawn(task, tmp_path, places, entry.Drawing(samplers, asked, load))

    at_end = [("weights-1", count, steps, seed) for steps in (2, 1) for count, seed in ((64, 5), (3, 69))]
    assert done == [("weights-0.5", 64, 2, 5), ("weights-0.5", 1, 2, 69), *at_end]
    assert [(take["moment"], take["step"], take["sampler"], take["pictures"]) for take in takes] == [
        (0.5, 3, "main", 65),
        (1.0, 6, "main", 67),
        (1.0, 6, "fast", 67),
    ]
    assert takes[-1]["pictures_per_second"] == 67 / 2000 and (tmp_path / takes[-1]["file"]).exists()


# ------------------------------------------------------------------------------------------------------------ the whole


@pytest.fixture
def quality(scripts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., int]:
    """The command in this process, and its entries too: tiny networks, features and samplers, and a clock of ticks."""
    benchmark, module, entry, peers = (scripts(name) for name in ("benchmark", "_quality", "_quality_entry", "_peers"))
    monkeypatch.setitem(peers.LUCIDRAINS, "ddpm-s", {"dim": 8, "dim_mults": (1, 2)})
    recipe = peers._LUCIDRAINS_EXAMPLE
    few = {name: sampler._replace(steps=2) for name, sampler in recipe.samplers.items()}
    monkeypatch.setattr(peers, "_LUCIDRAINS_EXAMPLE", replace(recipe, samplers=few))
    monkeypatch.setattr(entry, "OUR_SAMPLERS", {name: s._replace(steps=2) for name, s in entry.OUR_SAMPLERS.items()})

    features = JudgeFeatures(Judge.load(folder / "judge"))
    monkeypatch.setitem(extractors.EXTRACTORS, "efficientnet", lambda given: extractors.Extractor(features, "tiny"))
    ticks = count()
    for reader in (clock_module, entry):
        monkeypatch.setattr(reader, "monotonic", lambda: TICK * next(ticks))

    def run_here(command: list[object], *, log: Path) -> int:
        log.write_text("", encoding="utf-8")
        entry.run(Path(str(command[-1])))
        return 0

    monkeypatch.setattr(module, "run_alone", run_here)

    def run(*arguments: str | Path) -> int:
        fixed = ["benchmark.py", "quality", "--data.path", folder / "data", "--config", folder / "tiny.yaml"]
        fixed += ["--minutes", MINUTES, "--num_pictures", 67, "--num_between", 64]
        monkeypatch.setattr(sys, "argv", [str(part) for part in [*fixed, *arguments]])
        return benchmark.main()

    return run


def test_two_entries_have_the_same_time_and_are_scored_the_same_way(
    quality: Callable[..., int], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    assert quality("--entries", "ours", "ddpm-s", "--judge", folder / "judge", "--out", out) == 0

    printed = capsys.readouterr().out
    for name in ("ours", "ddpm-s"):
        result = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        step = result["training_seconds"] / result["steps"]
        reserve = {"ours": 1.0, "ddpm-s": 0.0}[name]  # for saving the run, before it is known how long that takes
        assert -reserve - step <= result["training_seconds"] - 60 * MINUTES <= step and step < 0.5
        assert result["pictures_seen"] == result["steps"] * {"ours": 11, "ddpm-s": 32}[name]
        assert result["pictures_per_second"] == pytest.approx(result["pictures_seen"] / result["training_seconds"])
        assert 0 < result["mib"]["training"] <= result["mib"]["with_sampling"]
        taken = [(take["moment"], take["sampler"], take["pictures"]) for take in result["takes"]]
        samplers = {"ours": ("main", "fast", "unguided"), "ddpm-s": ("main", "fast", "unguided", "live")}[name]
        at_end = [(1.0, kind, 67) for kind in samplers]
        assert taken == [(0.25, "main", 64), (0.5, "main", 64), *at_end]
        assert result["takes"][0]["minutes"] == pytest.approx(0.25 * MINUTES, abs=1.5 * step / 60)
        for take in result["takes"]:
            assert take["frechet"] > 0 and take["kid_error"] > 0 and take["sampled_pictures"] == take["pictures"]
            assert 0 <= take["agreement"]["value"] <= 1 and take["agreement"]["chance"] == 0.01
            assert take["class_agreement"]["chance"] == pytest.approx(1 / 3)
        assert Image.open(out / f"{name}.png").width > 8 * 8
    table = (out / "table.md").read_text(encoding="utf-8")
    assert [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")] == (
        ["| entry", "| ---", "| ours", "| ddpm-s", "| entry", "| ---", *["| ours"] * 3, *["| ddpm-s"] * 4]
    )
    assert table.strip() in printed
    for chart in ("kid.svg", "agreement.svg"):
        assert "ddpm-s" in "".join(ElementTree.parse(out / chart).getroot().itertext())


def test_an_entry_that_is_there_is_left_alone_and_one_made_otherwise_is_refused(
    quality: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert quality("--entries", "ours", "--out", out) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    again = []
    run_alone = sys.modules["_quality"].run_alone

    def noted(command: list[object], *, log: Path) -> int:
        again.append(Path(str(command[-1])).name)
        return run_alone(command, log=log)

    monkeypatch.setattr(sys.modules["_quality"], "run_alone", noted)
    assert quality("--entries", "ours", "--out", out) == 0
    assert again == [] and {path: path.read_bytes() for path in before} == before

    # what was drawn is still there: only the scores are made again
    (out / "ours.json").unlink()
    assert quality("--entries", "ours", "--out", out) == 0
    assert again == [] and (out / "ours.json").read_bytes() == before[out / "ours.json"]

    # and what was trained: by another sampler it is only drawn again
    (out / "ours.json").unlink()
    (out / "ours" / "record.json").unlink()
    entry = sys.modules["_quality_entry"]
    monkeypatch.setitem(entry.OUR_SAMPLERS, "fast", entry.Sampler("the run's own", 1, 1.0))
    monkeypatch.setattr(entry, "train_ours", None)  # calling it would raise a TypeError
    assert quality("--entries", "ours", "--out", out) == 0
    result, earlier = json.loads((out / "ours.json").read_text()), json.loads(before[out / "ours.json"])
    assert again == ["ours"] and result["steps"] == earlier["steps"] and result["mib"]["training"] > 0
    fast = [take for take in result["takes"] if take["sampler"] == "fast"]
    assert [(take["steps"], take["guidance"]) for take in fast] == [(1, 1.0)]
    assert [take["kid"] for take in result["takes"] if take["sampler"] == "main"] == [
        take["kid"] for take in earlier["takes"] if take["sampler"] == "main"
    ]

    capsys.readouterr()
    assert quality("--entries", "ours", "--num_pictures", "65", "--out", out) == 2
    assert "ours.json was made with another num_pictures: remove it" in capsys.readouterr().err
    (out / "ours.json").unlink()
    assert quality("--entries", "ours", "--num_pictures", "65", "--out", out) == 0
    result = json.loads((out / "ours.json").read_text())
    assert [take["pictures"] for take in result["takes"]] == [64, 64, 65, 65, 65] and result["steps"] == earlier[
        "steps"
    ]

    # what took hours is never thrown away unasked
    capsys.readouterr()
    assert quality("--entries", "ours", "--seed", "1", "--out", out) == 2
    error = capsys.readouterr().err
    assert error == (f"error: {out / 'ours'} was trained with another seed: remove it, or choose another --out\n")
    assert (out / "ours" / "weights-1").exists()


def test_an_entry_that_fails_leaves_the_others_their_turn(
    quality: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = sys.modules["_quality"]
    run_alone = module.run_alone

    def failing(command: list[object], *, log: Path) -> int:
        if Path(str(command[-1])).name == "ours":
            return run_alone(command, log=log)
        log.write_text("much\nerror: no\nroom\n", encoding="utf-8")
        return 3

    monkeypatch.setattr(module, "run_alone", failing)

    assert quality("--entries", "ddpm-s", "ours", "--out", tmp_path) == 2

    assert (tmp_path / "ours.json").exists() and not (tmp_path / "ddpm-s.json").exists()
    log = tmp_path / "ddpm-s" / "log.txt"
    said = capsys.readouterr().err
    assert said == f"error: not finished: ddpm-s (exit code 3: much / error: no / room; all it said: {log})\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--entries", "ddpm-xl"], "there is no entry 'ddpm-xl': choose from ours, ours-l, ours-s, ddpm,"),
        (["--minutes", "0"], "--minutes must be above 0, got 0"),
        (["--num_between", "63"], "63 sampled pictures are too few"),
        (["--num_between", "68"], "--num_between 68 is more than --num_pictures 67"),
        (["--judge", "absent"], "absent"),
        (["--data.path", "absent"], "absent"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_is_run(
    quality: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert quality("--out", tmp_path / "out", "--entries", "ours", *arguments) == 2

    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named_with_what_brings_it(
    quality: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["_peers"], "find_spec", lambda name: None if name[:4] == "deno" else name)

    assert quality("--entries", "ours", "ddpm-s") == 2
    assert capsys.readouterr().err == (
        "error: the entry ddpm-s needs denoising_diffusion_pytorch, which is not installed: "
        "pip install 'unet-attn[bench]'\n"
    )


@pytest.mark.slow
def test_each_entry_runs_in_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    run_alone = import_module("subprocess").run
    command = [sys.executable, SCRIPTS / "benchmark.py", "quality", "--data.path", folder / "data", "--minutes", "0.03"]
    command += ["--config", folder / "tiny.yaml", "--num_pictures", "64", "--num_between", "64", "--out", tmp_path]

    done = run_alone([str(part) for part in [*command, "--entries", "ours", "ddpm-s"]], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) for name in ("ours", "ddpm-s")]
    assert [result["steps"] > 0 for result in results] == [True, True]
    assert results[0]["mib"]["imports"] > 100
    log = (tmp_path / "ours" / "log.txt").read_text(encoding="utf-8")
    assert "error" not in log and (tmp_path / "ours" / "run" / "model_index.json").exists()
