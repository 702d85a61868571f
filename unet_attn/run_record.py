"""What the folder of a run tells, read without loading its network: settings, metrics, validations, scores.

Every file but config.yaml may be missing, and keys of the metrics too: older releases wrote fewer of them.
"""

import json
import re
import shlex
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from unet_attn.checkpoint import STATE, numbered
from unet_attn.config_files import read_yaml

CONFIG, LOGS, METRICS, VALIDATION = "config.yaml", "logs", "metrics.jsonl", "validation.jsonl"
EVALUATION, NEAREST = "evaluation.json", "evaluation_nearest.png"
DATA_SUMMARY, SKIPPED = "data.txt", "skipped.tsv"
SCALARS = ("step", "loss", "lr", "pictures_seen", "grad_norm", "pictures_per_second", "data_wait", "memory_gib")
NOISE_BINS = 8  # eighths of [0, 1] in loss_by_noise, 0 = clean
PART_OF_RUN = 20  # start, middle and end are each this part of the steps
_WEIGHTS = re.compile(r"diffusion_pytorch_model(-\d+-of-\d+)?\.safetensors")  # no variants, which repeat the weights
_GRID = re.compile(r"step-(\d+)\.png")


@dataclass(frozen=True)
class Metrics:
    """The lines of metrics.jsonl as columns. scalars: each of SCALARS as (N,), not-a-number where a line lacks it.

    loss_by_noise: (N, NOISE_BINS); unreadable: how many lines could not be read.
    """

    scalars: dict[str, np.ndarray]
    loss_by_noise: np.ndarray
    unreadable: int

    def __len__(self) -> int:
        return len(self.scalars["step"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.scalars[name]

    def last(self, name: str) -> float | None:
        """The last known value of a column."""
        known = self.scalars[name][np.isfinite(self.scalars[name])]
        return float(known[-1]) if len(known) else None

    @property
    def skipped_steps(self) -> list[int]:
        """Steps whose loss or gradient was not finite, so that they changed nothing."""
        bad = ~(np.isfinite(self["loss"]) & np.isfinite(self["grad_norm"]))
        return [int(step) for step in self["step"][bad]]

    @property
    def step_seconds(self) -> np.ndarray:
        """How long each step took, (N,)."""
        pictures = np.diff(self["pictures_seen"], prepend=nan)
        if len(pictures) > 1:
            pictures[0] = pictures[1]
        return pictures / self["pictures_per_second"]

    def loss_by_part(self) -> dict[str, tuple[list[float], list[float]]]:
        """The middles of the eighths of the noise levels and the mean loss in each, by the part of the run.

        An eighth that had no sample is left out; empty where none was recorded.
        """
        known = self.loss_by_noise[np.isfinite(self.loss_by_noise).any(axis=1)]
        if not len(known):
            return {}
        size = max(1, len(known) // PART_OF_RUN)
        middle = (len(known) - size) // 2
        spans = {"start": known[:size], "middle": known[middle : middle + size], "end": known[-size:]}
        parts = {}
        for name, rows in spans.items() if len(known) > 2 else [("end", known)]:
            found = [(n, column[np.isfinite(column)]) for n, column in enumerate(rows.T)]
            found = [((n + 0.5) / NOISE_BINS, float(column.mean())) for n, column in found if len(column)]
            parts[name] = ([place for place, _ in found], [value for _, value in found])
        return parts


@dataclass(frozen=True)
class RunRecord:
    """All that is known of a run.

    config: the resolved settings by section; config_text: the same as the file has it; validation: the lines of
    validation.jsonl; evaluation: of scripts/evaluate.py; grids: (step, picture) by step; skipped: (kind, path, reason)
    of files; seconds: of all sessions up to the last checkpoint.
    """

    folder: Path
    config: dict[str, Any]
    config_text: str
    metrics: Metrics
    validation: list[dict[str, Any]]
    evaluation: dict[str, Any] | None
    grids: list[tuple[int, Path]]
    data_summary: str | None
    skipped: list[tuple[str, ...]]
    seconds: float | None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def has_text(self) -> bool:
        return self.config.get("text_encoder") is not None

    @property
    def steps(self) -> int:
        return int(self.metrics.last("step") or 0)

    @property
    def shown_path(self) -> str:
        """The folder as a command should name it: as training was told, unless the folder has another name now."""
        told = str(self.setting("train", "output_dir") or "")
        return shlex.quote(told if Path(told).name == self.name else self.name)

    @property
    def data_path(self) -> str:
        return str(self.setting("data", "path") or "")

    @property
    def pictures(self) -> int | None:
        """How many pictures the run was trained on, as far as the summary of its data tells."""
        summary = self.data_summary or ""
        found = re.match(r"([\d,]+) pictures? in ", summary)
        held_out = re.search(r"^([\d,]+) pictures? held out", summary, re.MULTILINE)
        counts = [int(each[1].replace(",", "")) if each else 0 for each in (found, held_out)]
        return counts[0] - counts[1] if found else None

    @property
    def tuned_from(self) -> str | None:
        """The name of the model that was tuned to few steps, without its place; None if there was none."""
        start = self.setting("consistency", "start")
        return (Path(start).name or start) if isinstance(start, str) else None

    def setting(self, section: str, key: str) -> Any:
        """A value of the settings; None where there is none."""
        values = self.config.get(section)
        return values.get(key) if isinstance(values, dict) else None


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder. Raises ValueError for what is no run or has a damaged file in it, OSError if unreadable."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} is not a run of scripts/train.py: it has no {CONFIG}")
    config = read_yaml(path)
    if not isinstance(config.get("train"), dict):
        raise ValueError(f"{path} is not the configuration of a run: it has no section train")
    skipped, summary = folder / SKIPPED, folder / DATA_SUMMARY
    return RunRecord(
        folder=folder,
        config=config,
        config_text=path.read_text(encoding="utf-8"),
        metrics=_read_metrics(folder / LOGS / METRICS),
        validation=[line for line in _json_lines(folder / LOGS / VALIDATION) if line is not None],
        evaluation=_read_json(folder / EVALUATION),
        grids=_grids(folder / "samples"),
        data_summary=summary.read_text(encoding="utf-8", errors="replace").strip() if summary.is_file() else None,
        skipped=_read_skipped(skipped) if skipped.is_file() else [],
        seconds=_seconds(folder / "checkpoints"),
    )


def parameter_count(folder: Path) -> int | None:
    """How many numbers the weights of a part of the pipeline hold, by the headers of its files; None without files.

    Raises ValueError for a file that is no safetensors.
    """
    files = [path for path in sorted(folder.glob("*.safetensors")) if _WEIGHTS.fullmatch(path.name)]
    try:
        return sum(map(_numbers_in, files)) if files else None
    except SafetensorError as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from error


def _numbers_in(file: Path) -> int:
    with safe_open(file, framework="numpy") as weights:
        return sum(int(np.prod(weights.get_slice(name).get_shape())) for name in weights.keys())


def _read_metrics(path: Path) -> Metrics:
    columns = {name: array("d") for name in SCALARS}
    by_noise = array("d")
    unreadable = 0
    for line in _json_lines(path):
        if line is None or not isfinite(_number(line.get("step"))):
            unreadable += 1
            continue
        for name, column in columns.items():
            column.append(_number(line.get(name)))
        bins = line.get("loss_by_noise")
        known = isinstance(bins, list) and len(bins) == NOISE_BINS
        by_noise.extend(map(_number, bins) if known else [nan] * NOISE_BINS)
    scalars = {name: np.array(column) for name, column in columns.items()}
    return Metrics(scalars, np.array(by_noise).reshape(-1, NOISE_BINS), unreadable)


def _json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The objects of a file, None for a line that is none: a run that was killed may leave half a line."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            yield line if isinstance(line, dict) else None


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): remove it, and measure again with evaluate.py") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no figures of evaluate.py: remove it, and measure again")
    return value


def _grids(folder: Path) -> list[tuple[int, Path]]:
    found = [(_GRID.fullmatch(path.name), path) for path in folder.glob("step-*.png")]
    return sorted((int(match[1]), path) for match, path in found if match)


def _read_skipped(path: Path) -> list[tuple[str, ...]]:
    """The files that were left out, as `faults.write_faults` lists them."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    return [tuple(line.split("\t", 2)) for line in lines if line.count("\t") >= 2]


def _seconds(checkpoints: Path) -> float | None:
    for folder in reversed(numbered(checkpoints)):
        try:
            seconds = _number(json.loads((folder / STATE).read_text(encoding="utf-8")).get("seconds"))
        except (OSError, ValueError, AttributeError):
            continue  # not finished, or damaged: an earlier one will do
        if isfinite(seconds):
            return seconds
    return None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else nan
