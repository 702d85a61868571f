"""`benchmark.py quality`: this project's networks and others', each trained for the same time on the same pictures.

One entry after another, each in a process of its own (`_quality_entry`); here what they drew is scored, and the scores
become FOLDER/NAME.json, FOLDER/table.md and charts. An entry that is there already is not run again.
"""

import argparse
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from _children import last_words, run_alone
from _measure import describe_machine

if TYPE_CHECKING:  # they take seconds to import, which a wrong command line need not wait for
    from torch import Tensor

    from unet_attn.data import CaptionedImages
    from unet_attn.extractors import Extractor
    from unet_attn.judge import Judge

MOMENTS = [0.25, 0.5, 1.0]
ON_GRID, GRID_COLUMNS = 16, 8
TRAINING, DRAWING, SCORING = "training", "drawing", "scoring"


class Scorer(NamedTuple):
    """What the drawn pictures are compared with, and by what."""

    data: "CaptionedImages"
    chosen: list[int]
    extractor: "Extractor"
    judge: "Judge | None"
    seed: int


def add_arguments(parser: argparse.ArgumentParser, *, config: Path) -> None:
    parser.add_argument("--data.path", dest="data_path", type=Path, required=True, metavar="DIR", help="the pictures")
    parser.add_argument("--minutes", type=float, required=True, help="of training, for each entry")
    parser.add_argument("--entries", nargs="+", metavar="NAME", help="which to run, in this order (default: all)")
    parser.add_argument("--judge", type=Path, metavar="JUDGE", help="a judge of this data, for the caption agreement")
    parser.add_argument("--out", type=Path, default=Path("runs/quality"), metavar="FOLDER", help="(runs/quality)")
    parser.add_argument("--config", type=Path, default=config, help="ours; its size and colour hold for all")
    parser.add_argument("--num_pictures", type=int, default=512, help="drawn at the end, by each sampler (512)")
    parser.add_argument("--num_between", type=int, default=256, help="drawn after a quarter and a half (256)")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=compare)


def compare(options: argparse.Namespace) -> None:
    """Run what is not there yet, score it, and show all. Raises ValueError for what could not be run."""
    names = chosen_entries(options)
    try:
        scorer = prepared(options)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'unet-attn[train,eval]'") from error
    settings = settings_of(options, scorer)
    options.out.mkdir(parents=True, exist_ok=True)
    check_earlier(options.out, names, settings)

    results, failed = {}, []
    for name in names:
        result = options.out / f"{name}.json"
        if not result.exists():
            print(f"{name}: {options.minutes:g} minutes of training, then drawing", flush=True)
            if (reason := trained(name, options, settings, scorer.chosen)) is not None:
                failed.append(f"{name} ({reason})")
                continue
            scored(name, options.out, settings, scorer)
        results[name] = json.loads(result.read_text(encoding="utf-8"))
        write_summary(options.out, results)
    if results:
        print((options.out / "table.md").read_text(encoding="utf-8"))
    if failed:
        raise ValueError(f"not finished: {', '.join(failed)}")


# ----------------------------------------------------------------------------------------------- before anything is run


def chosen_entries(options: argparse.Namespace) -> list[str]:
    """The entries to run. Raises ValueError for what is wrong whatever the data are."""
    from _peers import PEERS, check_installed
    from _quality_entry import OUR_SIZES

    known = [*OUR_SIZES, *PEERS]
    names = list(dict.fromkeys(options.entries or known))
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no entry {unknown[0]!r}: choose from {', '.join(known)}")
    if options.minutes <= 0:
        raise ValueError(f"--minutes must be above 0, got {options.minutes:g}")
    if options.num_between > options.num_pictures:
        raise ValueError(f"--num_between {options.num_between} is more than --num_pictures {options.num_pictures}")
    if not 0 <= options.seed < 2**32 - max(0, options.num_pictures):
        raise ValueError(f"--seed must be at least 0 and below 2^32, got {options.seed}")
    for name in names:
        check_installed(name)
    if find_spec("torchmetrics") is None:
        raise ValueError("torchmetrics is not installed: pip install 'unet-attn[train,eval]'")
    return names


def prepared(options: argparse.Namespace) -> Scorer:
    """Read the pictures, the judge and the feature network. Raises ValueError or OSError for what cannot be used."""
    from _quality_entry import data_of

    from unet_attn.evaluation import check_counts, choose_pictures
    from unet_attn.extractors import make_extractor
    from unet_attn.judge import Judge, caption_key
    from unet_attn.measures import check_candidates

    check_counts(sampled=options.num_between)
    judge = None if options.judge is None else Judge.load(options.judge)
    extractor = make_extractor("efficientnet")
    data = data_of(str(options.config), str(options.data_path), seed=options.seed)
    chosen = choose_pictures(len(data), options.num_pictures, options.seed)
    check_counts(real=len(set(chosen[: options.num_between])))
    if judge is not None:
        check_candidates(len({caption_key(variants[0]) for variants in data.captions if variants}))
    return Scorer(data, chosen, extractor, judge, options.seed)


def settings_of(options: argparse.Namespace, scorer: Scorer) -> dict[str, dict[str, Any]]:
    """What entries must have in common to be compared: in training, in drawing, and in scoring."""
    from unet_attn.extractors import weights_digest

    judged = scorer.judge is not None
    training = {
        "machine": describe_machine(),
        "data": str(options.data_path),
        "data_fingerprint": scorer.data.fingerprint(),
        "config": options.config.read_text(encoding="utf-8"),
        "minutes": options.minutes,
        "moments": MOMENTS,
        "seed": options.seed,
        "threads": options.threads,
    }
    drawing = {"num_pictures": options.num_pictures, "num_between": options.num_between}
    scoring = {
        "extractor": scorer.extractor.name,
        "judge": str(options.judge) if judged else None,
        "judge_weights": weights_digest(scorer.judge) if judged else None,
    }
    return {TRAINING: training, DRAWING: drawing, SCORING: scoring}


def check_earlier(folder: Path, names: list[str], settings: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError for a result, or trained weights, that were made otherwise than they would be now."""
    for weights in (folder / name for name in names if (folder / name / "training.json").exists()):
        then, now = json.loads((weights / "settings.json").read_text(encoding="utf-8"))[TRAINING], settings[TRAINING]
        if other := [key for key in now if now[key] != then.get(key)]:
            raise ValueError(
                f"{weights} was trained with another {' and '.join(other)}: remove it, or choose another --out"
            )
    for path in (folder / f"{name}.json" for name in names):
        if not path.exists():
            continue
        try:
            was = json.loads(path.read_text(encoding="utf-8"))["settings"]
            now = {key: value for part in settings.values() for key, value in part.items()}
            then = {key: value for part in was.values() for key, value in part.items()}
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no result of this benchmark: move it away") from error
        if other := [key for key in now if now[key] != then.get(key)]:
            raise ValueError(f"{path} was made with another {' and '.join(other)}: remove it, or choose another --out")


# ------------------------------------------------------------------------------------------------------------ one entry


def trained(name: str, options: argparse.Namespace, settings: dict[str, Any], chosen: list[int]) -> str | None:
    """Train and draw in another process what of it is not done yet; returns why it came to no end, None if it did."""
    folder = options.out / name
    asked, record = folder / "settings.json", folder / "record.json"
    now = {part: settings[part] for part in (TRAINING, DRAWING)}
    if record.exists() and json.loads(asked.read_text(encoding="utf-8")) == now:
        return None
    if not (folder / "training.json").exists():  # `check_earlier` saw that what is trained is trained so
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    record.unlink(missing_ok=True)
    asked.write_text(json.dumps(now) + "\n", encoding="utf-8")
    task = {key: settings[TRAINING][key] for key in ("minutes", "moments", "seed", "threads")}
    task |= {"name": name, "config": str(options.config), "data": str(options.data_path), "chosen": chosen}
    task["num_between"] = options.num_between
    (folder / "task.json").write_text(json.dumps(task) + "\n", encoding="utf-8")
    log = folder / "log.txt"
    code = run_alone([sys.executable, Path(__file__).with_name("_quality_entry.py"), folder], log=log)
    if code or not record.exists():
        return f"exit code {code}: {last_words(log)}; all it said: {log}"
    return None


def scored(name: str, out: Path, settings: dict[str, Any], scorer: Scorer) -> None:
    """Write NAME.json and NAME.png from what the entry drew."""
    import numpy as np
    import torch

    from unet_attn.checkpoint import write_whole

    folder = out / name
    result = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    result["settings"] = settings
    for take in result["takes"]:
        pixels = torch.from_numpy(np.load(folder / take["file"]))
        take |= scores(pixels, scorer)
        if take["moment"] == 1 and take["sampler"] == "main":
            grid(pixels, scorer).save(out / f"{name}.png")
    write_whole(out / f"{name}.json", json.dumps(result, indent=2, allow_nan=False) + "\n")


def scores(pixels: "Tensor", scorer: Scorer) -> dict[str, Any]:
    """The distances from real pictures, and the judge's agreement. pixels: (N, C, H, W) uint8.

    agreement: the judge finds the whole caption among 100; class_agreement: the first word among all first words, which
    a network that knows no more of a caption is asked as fairly as one that reads it.
    """
    import torch
    from _peer import Classes

    from unet_attn.evaluation import MOST_REAL, choose_pictures, compare_features
    from unet_attn.extractors import extract_features
    from unet_attn.feature_cache import cached_features
    from unet_attn.images import scaled
    from unet_attn.judge import caption_agreement
    from unet_attn.measures import CANDIDATES

    data, chosen = scorer.data, scorer.chosen[: len(pixels)]
    pictures = torch.stack([scaled(picture.numpy()) for picture in pixels])
    # the pictures whose captions were drawn come first
    reference = choose_pictures(len(data), min(MOST_REAL, len(data)), scorer.seed)
    real = cached_features((data[index]["image"] for index in reference), scorer.extractor)
    sampled = extract_features(pictures, scorer.extractor.network)
    made_for = torch.arange(len(chosen)) % len(data)
    found: dict[str, Any] = vars(compare_features(real, sampled, made_for=made_for))
    if scorer.judge is None:
        return found

    asked = [n for n, index in enumerate(chosen) if data.captions[index]]
    captions = [data.captions[chosen[n]][0] for n in asked]
    known = [variants[0] for variants in data.captions if variants]
    agreement = caption_agreement(scorer.judge, pictures[asked], captions, known, seed=scorer.seed)
    found |= {"agreement": agreement._asdict() | {"chance": 1 / CANDIDATES}}
    classes = Classes(data)
    names = [name for name in classes.names if name]
    if len(names) > 1:
        words, among = [classes.names[classes.of[chosen[n]]] for n in asked], min(CANDIDATES, len(names))
        by_class = caption_agreement(scorer.judge, pictures[asked], words, names, candidates=among, seed=scorer.seed)
        found |= {"class_agreement": by_class._asdict() | {"chance": 1 / among}}
    return found


def grid(pixels: "Tensor", scorer: Scorer) -> Any:
    """The first pictures with the captions that they were drawn for."""
    from einops import rearrange
    from PIL import Image

    from unet_attn.pipelines.grid import picture_grid

    captions = [next(iter(scorer.data.captions[index]), "") for index in scorer.chosen[:ON_GRID]]
    arrays = [rearrange(picture, "c h w -> h w c").squeeze(-1).numpy() for picture in pixels[: len(captions)]]
    return picture_grid([Image.fromarray(array) for array in arrays], captions, columns=GRID_COLUMNS)


def write_summary(out: Path, results: dict[str, dict[str, Any]]) -> None:
    from _quality_report import charts, tables

    (out / "table.md").write_text(tables(results), encoding="utf-8")
    for name, svg in charts(results).items():
        (out / name).write_text(svg, encoding="utf-8")
