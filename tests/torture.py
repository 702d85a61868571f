"""Kill a small training run at random moments, resume it, and compare what is left with a run that was never disturbed.

    python tests/torture.py --kills 100 --minutes 20 [--seed N]

Lives end by SIGKILL or SIGTERM after a random time, or by SIGKILL at a random change of a file in the run folder, so
that saving, publishing and drawing are hit in their middle. A dead run is continued as `make quickstart` does it. One
that gets to its end has to equal the straight run bit for bit: weights, averages, optimizer, recorded losses, grids,
and the names of all files. Then the next run begins, until there were enough kills or the time is over. Exit code 1
tells of a difference. What dies where follows from the seed, less what the machine's speed decides.
"""

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from time import monotonic

import numpy as np
import processes
import yaml
from PIL import Image
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
STEPS, SAVE_EVERY, DRAW_EVERY = 24, 3, 4  # so that some saves and grids fall together and others do not
INTERRUPTED = 75
AREAS = ("checkpoints", ".partial", "samples", "logs", "top")  # of a run folder; .partial is what is to be published
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
RECORDED = ("step", "loss", "lr", "grad_norm", "pictures_seen")
ENOUGH = 10  # faults; more would not tell more
LONGEST_LIFE = 120  # seconds, of a run that takes a few


def write_config(folder: Path, *, steps: int) -> Path:
    """Thirteen tiny pictures and the configuration of a tiny model, which is trained in a second or two."""
    pictures = folder / "pictures"
    pictures.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(13):
        Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8)).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text(f"{'red' if number % 2 else 'blue'} thing {number}")
    values = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
    values["data"] |= {"path": str(pictures), "resolution": 8}
    values["text_encoder"]["init_args"] = {"dim": 12, "depth": 1, "heads": 2}
    values["tokenizer"] = {"vocab_size": 300, "max_length": 11}
    values["unet"] = {"in_channels": 1, "block_channels": [8, 16], "attention_levels": [1], "dim_head": 8}
    values["train"] |= {
        "batch_size": 5,
        "max_steps": steps,
        "max_minutes": None,
        "warmup_steps": 2,
        "checkpoint_every": SAVE_EVERY,
        "sample_every": DRAW_EVERY,
        "sample_prompts": ["red thing"],
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


# one life of a run, in a process of its own


def live(config: Path, run: Path, log: Path, die_at: tuple[str, int] | None) -> int:
    """Train or resume as scripts/train.py does. die_at: an area and the change of a file in it not to survive.

    Leaves the number of changes in each area beside the log, if it comes to that. Returns the exit code.
    """
    with log.open("ab", buffering=0) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    # its own lock is one between processes, of which each that is killed would leave a semaphore behind
    tqdm.set_lock(threading.RLock())
    changes: Counter[str] = Counter()

    def watch(event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax"
        if not (writes or event in CHANGES) or not str(arguments[0]).startswith(str(run)):
            return
        area = next((area for area in AREAS if f"/{area}/" in str(arguments[0])), "top")
        changes[area] += 1
        if die_at == (area, changes[area]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "scripts" / "train.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    resume = ["--train.resume", "latest"] if run.exists() else []
    code = script.main(["--config", str(config), "--train.output_dir", str(run), *resume])
    log.with_suffix(".changes").write_text(json.dumps(changes))
    return code


class Torture:
    """Runs in `folder`, one after the other, and what happened to them; `faults` is empty if all was well."""

    def __init__(self, folder: Path, *, seed: int, steps: int) -> None:
        self.random, self.steps = random.Random(seed), steps
        self.folder, self.config, self.log = folder, write_config(folder, steps=steps), folder / "lives.log"
        self.faults: list[str] = []
        self.ends: Counter[str] = Counter()
        self.kills = self.runs = 0

        self.straight = folder / "straight"
        began = monotonic()
        code = self._life(self.straight).exitcode
        if code != 0:
            raise SystemExit(f"the straight run ended with {code}:\n{self.last_words()}")
        self.seconds = monotonic() - began
        self.changes = json.loads(self.log.with_suffix(".changes").read_text())

    def one_run(self, *, kills: int, until: float) -> None:
        """One run from its beginning to its end; after `kills` in all, or at the time `until`, it is left in peace."""
        self.runs += 1
        run = self.folder / f"run-{self.runs}"
        while True:
            if run.exists() and not any(run.glob("checkpoints/step-*/manifest.json")):
                shutil.rmtree(run)
            code = self._disturbed_life(run) if self.kills < kills and monotonic() < until else self._life(run).exitcode
            if code == 0:
                break
            if code not in (-signal.SIGKILL, -signal.SIGTERM, INTERRUPTED):
                self.faults.append(
                    f"{run.name}: a life after {self.kills} kills ended with {code}: {self.last_words()}"
                )
                return
            self.kills += 1
            self.ends[self._where(run)] += 1
        self.faults += [f"{run.name}: {difference}" for difference in differences(run, self.straight)]
        shutil.rmtree(run)
        self.log.unlink()

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def _disturbed_life(self, run: Path) -> int:
        left = 1 - _last_step(run) / self.steps
        how = self.random.choice(["file", "file", "kill", "kill", "term"])
        area = self.random.choice(sorted(self.changes))
        # the last part of a life is left out: what does not kill costs time
        die_at = (area, self.random.randint(1, max(1, round(0.8 * left * self.changes[area]))))
        # the start takes its time however little is left to train
        seconds = self.random.uniform(0, self.seconds * (0.4 + 0.6 * left)) if how != "file" else LONGEST_LIFE
        return self._life(
            run, die_at if how == "file" else None, seconds, signal.SIGTERM if how == "term" else signal.SIGKILL
        ).exitcode

    def _life(
        self, run: Path, die_at: tuple[str, int] | None = None, seconds: float = LONGEST_LIFE, end: int = signal.SIGKILL
    ) -> processes.ForkServerProcess:
        process = processes.start(live, self.config, run, self.log, die_at)
        process.join(seconds)
        if process.is_alive():
            os.kill(process.pid, end)
            process.join(LONGEST_LIFE)
        if process.is_alive():
            process.kill()
            process.join()
            self.faults.append(f"{run.name}: a life did not end within {LONGEST_LIFE} s of its signal")
        return process

    def _where(self, run: Path) -> str:
        """What the last life was at when it ended, as far as its leftovers tell."""
        if any(run.glob("checkpoints/.step-*")):
            return "writing a checkpoint"
        if (run / ".partial").exists() or any(run.glob(".*.old")):
            return "publishing"
        return "training, drawing or stopped" if any(run.glob("checkpoints/*")) else "before the first checkpoint"


def differences(run: Path, straight: Path) -> list[str]:
    """What a finished run has otherwise than the straight one."""
    from safetensors.torch import load_file
    from torch import equal

    from unet_attn.pipelines.text_to_image import TextToImagePipeline

    found = []
    ours, theirs = _names(run), _names(straight)
    found += [f"{name} is left over" for name in sorted(ours - theirs)]
    found += [f"{name} is missing" for name in sorted(theirs - ours)]
    for name in sorted(ours & theirs):
        if name.endswith(".safetensors"):
            left, right = load_file(run / name), load_file(straight / name)
            wrong = [key for key in left.keys() | right.keys() if not _same(left.get(key), right.get(key), equal)]
            found += [f"{name} differs in {len(wrong)} tensors, {min(wrong)} first"] if wrong else []
        elif (
            name.endswith((".png", "validation.jsonl")) and (run / name).read_bytes() != (straight / name).read_bytes()
        ):
            found.append(f"{name} differs")
    lines, expected = _recorded(run), _recorded(straight)
    if lines != expected:
        step = next((pair[1][0] for pair in zip(lines, expected, strict=False) if pair[0] != pair[1]), "the end")
        found.append(f"metrics.jsonl has {len(lines)} lines of {len(expected)} and differs from step {step}")
    try:
        TextToImagePipeline.from_pretrained(run)
    except (ValueError, OSError) as error:
        found.append(f"the run folder does not load: {error}")
    return found


def _names(run: Path) -> set[str]:
    """The files that a run leaves, less those of TensorBoard, of which each life writes its own.

    Of the checkpoints only the last counts: a signal makes one more, at a step of its own.
    """
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    earlier = tuple(f"checkpoints/{path.name}/" for path in sorted(run.glob("checkpoints/step-*"))[:-1])
    names = {name for name in names if not name.startswith(earlier)}
    return {name for name in names if not name.startswith("logs/") or name.endswith((".jsonl", ".partial"))}


def _same(left: object, right: object, equal: object) -> bool:
    return left is not None and right is not None and equal(left, right)


def _recorded(run: Path) -> list[list[float]]:
    lines = (run / "logs" / "metrics.jsonl").read_text().splitlines()
    return [[json.loads(line)[key] for key in RECORDED] for line in lines]


def _last_step(run: Path) -> int:
    return max((int(path.parent.name[5:]) for path in run.glob("checkpoints/step-*/manifest.json")), default=0)


def torture(folder: Path, *, kills: int, minutes: float, seed: int, steps: int = STEPS) -> Torture:
    """Run until there were `kills` or `minutes` have passed; a run that has begun is brought to its end."""
    until = monotonic() + 60 * minutes
    result = Torture(folder, seed=seed, steps=steps)
    while result.kills < kills and monotonic() < until and len(result.faults) < ENOUGH:
        result.one_run(kills=kills, until=until)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unet-attn-torture-") as folder:
        os.environ |= {
            "XDG_CACHE_HOME": folder,
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        result = torture(Path(folder), kills=options.kills, minutes=options.minutes, seed=options.seed)
    where = ", ".join(f"{count} {name}" for name, count in result.ends.most_common())
    print(f"seed {options.seed}: {result.kills} kills in {result.runs} runs of {STEPS} steps: {where}")
    for fault in result.faults:
        print(f"FAULT {fault}")
    if not result.faults:
        print("every run that was killed and resumed equals the straight run bit for bit")
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
