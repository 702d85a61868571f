"""Choose how long the weights of a trained run are averaged, after training.

    python scripts/ema.py RUN --length 0.05 0.1 0.15 [--step N] [--out DIR]

For each length a complete pipeline is written to DIR/length-LENGTH, as RUN itself is one. The length is a share of
the training: at 0.1 its last fifth has five sixths of the weight. The run must have kept snapshots
(--train.ema_snapshot_every): docs/ema.md.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from _folder import fresh_folder, refuse_filled

if TYPE_CHECKING:  # they take seconds to import, which a wrong command line need not wait for
    from torch import Tensor, nn

    from unet_attn.pipelines.text_to_image import TextToImagePipeline
    from unet_attn.posthoc import Profile, Snapshot

# Up to this error of the fit the average was within a tenth of its distance from the live weights (docs/ema.md).
GOOD_ERROR = 0.1
SCANNED = [number / 200 for number in range(1, 57)]  # lengths 0.005 to 0.28, to tell what snapshots can express
TRAINED_PARTS = ("unet", "text_encoder")


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument("--length", type=float, nargs="+", required=True, help="above 0 and at most 0.28")
    parser.add_argument("--step", metavar="N", type=int, help="the average as it was after this step (the last)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder for the pipelines (RUN/ema)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        average(options.run, options.length, step=options.step, out=options.out or options.run / "ema")
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def average(run: Path, lengths: list[float], *, step: int | None, out: Path) -> None:
    """Write a pipeline for each length, each complete or not at all."""
    if not run.is_dir():
        raise FileNotFoundError(f"{run} is no folder")
    lengths = list(dict.fromkeys(lengths))
    folders = [out / f"length-{length:g}" for length in lengths]
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            raise ValueError(f"two of the lengths would be written to {folder}: give one of them")
        refuse_filled(folder)
    from unet_attn.pipelines.text_to_image import TextToImagePipeline
    from unet_attn.posthoc import Profile, find_snapshots, fit, synthesize

    snapshots = find_snapshots(run, step=step)
    last = snapshots[-1]
    profiles = [profile for snapshot in snapshots for profile in snapshot.profiles]
    coefficients, errors = fit(profiles, [Profile(length, last.updates) for length in lengths])
    pipeline = TextToImagePipeline.from_pretrained(run)
    print(f"{len(snapshots)} snapshots up to step {last.step}")
    for length, error in zip(lengths, errors.tolist(), strict=True):
        if error > GOOD_ERROR:
            warn_of_poor_fit(length, error, profiles, snapshots)

    for length, error, folder, averages in zip(
        lengths, errors.tolist(), folders, synthesize(snapshots, coefficients), strict=True
    ):
        put_into(pipeline, averages, run)
        with fresh_folder(folder) as partial:
            pipeline.save_pretrained(partial)
            if (run / "config.yaml").is_file():  # by which evaluate.py knows how the pictures were read
                shutil.copy(run / "config.yaml", partial)
            about = {"length": length, "step": last.step, "fit_error": error}
            (partial / "ema.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        print(f"length {length:g}: error of the fit {100 * error:.1f} %, written to {folder}")


def warn_of_poor_fit(length: float, error: float, profiles: list["Profile"], snapshots: list["Snapshot"]) -> None:
    """Say that an average is not what was asked for, and what these snapshots can give."""
    from unet_attn.posthoc import Profile, fit

    _, errors = fit(profiles, [Profile(each, snapshots[-1].updates) for each in SCANNED])
    good = [each for each, found in zip(SCANNED, errors.tolist(), strict=True) if found <= GOOD_ERROR]
    print(
        f"warning: these snapshots cannot express length {length:g}: the error of the fit is {100 * error:.0f} %; "
        f"they can from about {min(good):g} to {max(good):g}, and more of them (--train.ema_snapshot_every) widen that",
        file=sys.stderr,
    )


def put_into(pipeline: "TextToImagePipeline", averages: dict[str, "Tensor"], run: Path) -> None:
    """Set the trained weights of `pipeline` to `averages`. Raises ValueError if they are another model's."""
    from unet_attn.ema import load_averages, trainable

    weights: dict[str, nn.Parameter] = {}
    for part in TRAINED_PARTS:
        if getattr(pipeline, part) is not None:
            weights |= {f"{part}.{name}": parameter for name, parameter in trainable(getattr(pipeline, part)).items()}
    # the uncertainty that a loss is weighed by is trained and averaged too, but is no part of a pipeline
    averages = {name: average for name, average in averages.items() if name.partition(".")[0] in TRAINED_PARTS}
    unknown = sorted(averages.keys() - weights.keys())
    try:
        if unknown:
            raise ValueError(f"there is no {unknown[0]!r} in the pipeline")
        load_averages(weights, averages)
    except ValueError as error:
        raise ValueError(f"the snapshots in {run} are of another model than its pipeline: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
