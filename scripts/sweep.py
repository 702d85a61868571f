"""Compare variants of a configuration: each trains for the same time with every seed, and is scored the same way.

    python scripts/sweep.py configs/experiments/patch_and_widths.yaml --minutes 10 --seeds 0 1 [--judge runs/judge]

An experiment names a base configuration and, for each variant, what it changes:

    config: configs/quickstart.yaml
    variants:
      base: {}
      patch 4: {unet.patch_size: 4}

Each variant and seed trains with scripts/train.py, one after another, in FOLDER/VARIANT-seedN and is scored by
scripts/evaluate.py. A row goes to FOLDER/results.jsonl, and what has a row there is not run again; the table goes to
FOLDER/table.md too.
"""

import argparse
import json
import re
import shutil
import statistics
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _children import last_words, run_alone
from sample import Parser

from unet_attn.config_files import read_yaml

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
NO_LOOKS = {"train.sample_every": None, "train.validate_every": None, "train.trackers": [], "train.resume": None}
PACKAGE = re.compile(r"\$\{package:(\w+)\}")  # in a value, stands for the folder of an installed package
# of a result, with the factor and the digits that it is shown with
FIGURES = {
    "kid": ("KID x 1000", 1000, 1),
    "frechet": ("Frechet distance", 1, 1),
    "agreement": ("caption agreement", 1, 3),
    "loss": ("loss", 1, 4),
    "gap_exchanged": ("gap, exchanged captions", 1, 4),
}


# what is the sweep's to set, so that its rows can be compared; by what
FIXED = {
    "data.path": "--data.path",
    "train.output_dir": "--out",
    "train.seed": "--seeds",
    "train.max_minutes": "--minutes",
    "train.max_steps": "--steps",
}


@dataclass(frozen=True)
class Experiment:
    """A base configuration, and what each variant changes of it: {variant: {SECTION.KEY: value}}."""

    name: str
    config: Path
    variants: dict[str, dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path, metavar="FILE")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="of training, for each (10)")
    length.add_argument("--steps", type=int, help="of training, for each, instead of minutes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="(0)")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--data.path", dest="data_path", type=Path, metavar="DIR", help="(the configuration's)")
    parser.add_argument("--judge", type=Path, metavar="JUDGE", help="a judge of this data, for the caption agreement")
    parser.add_argument("--num_pictures", type=int, default=512, help="sampled from each (512)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="(runs/sweeps/NAME)")
    try:
        sweep(parser.parse_args(arguments))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def sweep(options: argparse.Namespace) -> None:
    """Run what has no row yet, and print the table. Raises ValueError for what could not be run."""
    experiment = read_experiment(options.experiment)
    if unknown := set(options.variants or ()) - set(experiment.variants):
        known = ", ".join(experiment.variants)
        raise ValueError(f"{options.experiment} has no variant {min(unknown)!r}: it has {known}")
    out = options.out or ROOT / "runs" / "sweeps" / experiment.name
    check(options, experiment)
    settings = settings_of(options, experiment)
    identities = [
        settings | {"variant": variant, "overrides": experiment.variants[variant], "seed": seed}
        for seed in dict.fromkeys(options.seeds)  # all variants with one before the next, so that a table soon has all
        for variant in dict.fromkeys(options.variants or experiment.variants)
    ]
    done = [row["settings"] for row in read_rows(out)]
    missing = [identity for identity in identities if identity not in done]
    check_earlier(out, missing)
    out.mkdir(parents=True, exist_ok=True)

    failed = []
    for identity in missing:
        name = f"{identity['variant']}, seed {identity['seed']}"
        print(name, flush=True)
        try:
            append_row(out, measured(options, experiment, out, identity))
        except ValueError as error:
            failed.append(f"{name}: {error}")
    rows = [row for row in read_rows(out) if is_alike(row, settings, experiment)]
    if rows:
        table = table_of(rows, list(experiment.variants), settings)
        (out / "table.md").write_text(table, encoding="utf-8")
        print(table)
    if failed:
        raise ValueError(f"not finished: {'; '.join(failed)}")


# ----------------------------------------------------------------------------------------------- before anything is run


def read_experiment(path: Path) -> Experiment:
    """Raises ValueError, naming what is wrong, if the file is no experiment."""
    wanted = "the keys config and variants, and no others"
    found = read_yaml(path, wanted)
    if set(found) != {"config", "variants"}:
        raise ValueError(f"{path} must have {wanted}")
    variants = found["variants"]
    if not isinstance(variants, dict) or not variants:
        raise ValueError(f"{path}: variants must be names with what each changes")
    variants = {str(name): changes for name, changes in variants.items()}
    for name, changes in variants.items():
        if isinstance(changes, dict) and (taken := [key for key in changes if key in FIXED]):
            raise ValueError(f"{path}: variant {name!r} sets {taken[0]}, which is set by {FIXED[taken[0]]}")
        if not isinstance(changes, dict) or not all(re.fullmatch(r"\w+(\.\w+)*", str(key)) for key in changes):
            raise ValueError(f"{path}: variant {name!r} must be SECTION.KEY: value, or {{}}")
    if len({slug(name) for name in variants}) < len(variants):
        raise ValueError(f"{path}: two variants would have the same folder name")
    if not isinstance(found["config"], str):
        raise ValueError(f"{path}: config must be the path of a configuration, got {found['config']!r}")
    config = Path(found["config"])
    config = config if config.is_absolute() or config.is_file() else ROOT / config
    if not config.is_file():
        raise ValueError(f"{path}: there is no configuration {found['config']}")
    return Experiment(path.stem, config, variants)


def settings_of(options: argparse.Namespace, experiment: Experiment) -> dict[str, Any]:
    """What all rows of a table have in common."""
    from _measure import describe_machine

    from unet_attn.extractors import weights_digest
    from unet_attn.judge import Judge

    return {
        "machine": describe_machine(),
        "config": read_yaml(experiment.config),
        "minutes": None if options.steps is not None else options.minutes or 10.0,
        "steps": options.steps,
        "data": None if options.data_path is None else str(options.data_path),
        "judge": None if options.judge is None else weights_digest(Judge.load(options.judge)),
        "num_pictures": options.num_pictures,
    }


def check(options: argparse.Namespace, experiment: Experiment) -> None:
    """Refuse now what would be refused only after minutes, by parsing the command line of every variant.

    Raises ValueError naming the variant.
    """
    if options.minutes is not None and options.minutes <= 0:
        raise ValueError(f"--minutes must be above 0, got {options.minutes:g}")
    if options.steps is not None and options.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {options.steps}")
    if find_spec("torchmetrics") is None:
        raise ValueError("torchmetrics is not installed: pip install 'unet-attn[train,eval]'")
    from jsonargparse import ArgumentError
    from train import TrainOptions, expand_homes, make_parser

    from unet_attn.evaluation import check_counts

    check_counts(sampled=options.num_pictures)
    parser = make_parser()
    for name, changes in experiment.variants.items():
        arguments = train_arguments(options, experiment, changes, options.seeds[0], Path("unused"))
        try:
            config = expand_homes(parser.parse_args(arguments))
            TrainOptions(**config.train.as_dict())
        except (ArgumentError, ValueError) as error:
            raise ValueError(f"variant {name!r}: {' '.join(str(error).split())}") from error
    if not Path(config.data.path).exists():
        raise ValueError(f"there is no data set {config.data.path}: name one with --data.path")


def check_earlier(out: Path, missing: list[dict[str, Any]]) -> None:
    """Raise ValueError for a run that is in the way of one to come, and that a row of other settings tells of."""
    rows = read_rows(out)
    for identity in missing:
        run = run_folder(out, identity)
        told = [row["settings"] for row in rows if Path(row["run"]).name == run.name]
        if told and run.exists():
            other = " and ".join(key for key in identity if identity[key] != told[-1].get(key))
            raise ValueError(f"{run} was made with another {other}: remove it, or choose another --out")


# ---------------------------------------------------------------------------------------------------------- one variant


def run_folder(out: Path, identity: dict[str, Any]) -> Path:
    return out / f"{slug(identity['variant'])}-seed{identity['seed']}"


def slug(name: str) -> str:
    """A variant's name as that of a folder; 'mean -0.5' is another than 'mean 0.5'."""
    name = re.sub(r"(?<![\w.])-(?=[\d.])", "minus ", name)
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "variant"


def train_arguments(
    options: argparse.Namespace, experiment: Experiment, changes: dict[str, Any], seed: int, run: Path
) -> list[str]:
    """scripts/train.py's command line of a variant."""
    fixed: dict[str, Any] = {"train.output_dir": str(run), "train.seed": seed, "train.max_steps": options.steps}
    fixed["train.max_minutes"] = None if options.steps is not None else options.minutes or 10.0
    if options.data_path is not None:
        fixed["data.path"] = str(options.data_path)
    merged = NO_LOOKS | changes | fixed
    return ["--config", str(experiment.config), *(f"--{key}={written(value)}" for key, value in merged.items())]


def written(value: Any) -> str:
    """A value of an experiment as the command line has it."""

    def folder(match: re.Match[str]) -> str:
        found = find_spec(match[1])
        if found is None or not found.submodule_search_locations:
            raise ValueError(f"the package {match[1]} is not installed: pip install --no-deps {match[1]}")
        return found.submodule_search_locations[0]

    if isinstance(value, str):
        return PACKAGE.sub(folder, value)
    return PACKAGE.sub(folder, json.dumps(value))


def measured(
    options: argparse.Namespace, experiment: Experiment, out: Path, identity: dict[str, Any]
) -> dict[str, Any]:
    """Train and score a variant; its row. Raises ValueError with the end of the log if either fails."""
    run = run_folder(out, identity)
    log = run.with_name(f"{run.name}.log")
    shutil.rmtree(run, ignore_errors=True)  # of a sweep that was interrupted: no row tells of it (`check_earlier`)
    arguments = train_arguments(options, experiment, identity["overrides"], identity["seed"], run)
    code = run_alone([sys.executable, SCRIPTS / "train.py", *arguments], log=log)
    if code:
        raise ValueError(f"training ended with exit code {code}: {last_words(log)}")
    metrics = (run / "logs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in metrics]

    config = read_yaml(run / "config.yaml")
    command = [sys.executable, SCRIPTS / "evaluate.py", run, "--data.path", config["data"]["path"]]
    command += ["--num_pictures", str(options.num_pictures)]
    command += [] if options.judge is None or config["text_encoder"] is None else ["--judge", options.judge]
    log = run.with_name(f"{run.name}-evaluation.log")
    code = run_alone(command, log=log)
    if code:
        raise ValueError(f"scoring ended with exit code {code}: {last_words(log)}")
    evaluation = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    return {
        "settings": identity,
        "steps": steps[-1]["step"],
        "pictures_per_second": statistics.median(step["pictures_per_second"] for step in steps),
        "figures": figures_of(evaluation),
        "run": str(run),
    }


def figures_of(evaluation: dict[str, Any]) -> dict[str, float]:
    """Those of FIGURES that an evaluation has."""
    loss = evaluation["loss"]
    found = {"kid": evaluation["kid"], "frechet": evaluation["frechet"]}
    found["loss"] = loss.get("true", loss["empty"])["value"]
    if "gap_exchanged" in loss:
        found["gap_exchanged"] = loss["gap_exchanged"]["value"]
    if "agreement" in evaluation:
        found["agreement"] = evaluation["agreement"]["rate"]["value"]
    return found


# ------------------------------------------------------------------------------------------------------ what comes out


def read_rows(out: Path) -> list[dict[str, Any]]:
    """The rows so far; a line cut off by a crash is left out."""
    path = out / "results.jsonl"
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def append_row(out: Path, row: dict[str, Any]) -> None:
    path = out / "results.jsonl"
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as stream:
        stream.write("\n" * cut_off + json.dumps(row) + "\n")


def is_alike(row: dict[str, Any], settings: dict[str, Any], experiment: Experiment) -> bool:
    """Whether a row was measured as these settings say, of a variant as it is now."""
    then = row["settings"]
    same = all(then.get(key) == value for key, value in settings.items())
    return same and experiment.variants.get(then["variant"]) == then["overrides"]


def table_of(rows: list[dict[str, Any]], variants: list[str], settings: dict[str, Any]) -> str:
    """A Markdown table, a line for each variant: the mean over its seeds, and how far apart these are."""
    shown = [name for name in FIGURES if any(name in row["figures"] for row in rows)]
    columns = ["variant", "seeds", "steps", "pictures/s", *(FIGURES[name][0] for name in shown)]
    lines = [columns, ["---"] * len(columns)]
    for variant in variants:
        own = [row for row in rows if row["settings"]["variant"] == variant]
        if not own:
            continue
        seeds = ", ".join(str(row["settings"]["seed"]) for row in own)
        cells = [variant, seeds, f"{statistics.mean(row['steps'] for row in own):,.0f}"]
        cells.append(f"{statistics.mean(row['pictures_per_second'] for row in own):.1f}")
        for name in shown:
            _, factor, digits = FIGURES[name]
            values = [factor * row["figures"][name] for row in own if name in row["figures"]]
            cells.append(mean_and_spread(values, digits=digits))
        lines.append(cells)
    length = f"{settings['minutes']:g} minutes" if settings["minutes"] is not None else f"{settings['steps']} steps"
    head = (
        f"{length} of training each, {settings['num_pictures']} pictures; mean over the seeds (lowest to highest)\n\n"
    )
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def mean_and_spread(values: list[float], *, digits: int) -> str:
    """The mean, and with several values the lowest and the highest."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
