"""Train a judge of your own captioned pictures: it learns which caption belongs to which picture.

    python scripts/train_judge.py DIR --out runs/judge

A tenth of the pictures is held out. How often the judge finds their captions among 100 is printed, and kept with it:
sampled pictures cannot be expected to do better. So is how often without those that are near doubles of a trained
picture, which it finds more easily. Then: python scripts/evaluate.py RUN --judge runs/judge ...
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _folder import check_folder
from _reading import reading_options, section_of

if TYPE_CHECKING:  # they take seconds to import, which a wrong command line need not wait for
    from torch import Tensor

    from unet_attn.judge import Judge

LEAST = {"resolution": 1, "patch_size": 1, "dim": 1, "steps": 2, "batch_size": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DIR", type=Path, help="captioned pictures")
    parser.add_argument("--out", type=Path, required=True, metavar="JUDGE", help="a new folder for the judge")
    add_training_options(parser, network="image transformer", dim=48, steps=900)
    return told_in_one_line(train, parser.parse_args())


def add_training_options(parser: argparse.ArgumentParser, *, network: str, dim: int, steps: int) -> None:
    """What the training of a small network on pictures asks for; `network` is what has the width `dim`."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="a training's YAML file: data is read as it says")
    parser.add_argument("--resolution", type=int, help="side in pixels (default: the --config's, or 32)")
    parser.add_argument("--channels", type=int, choices=(1, 3), help="1 = grey, 3 = colour (default: likewise, or 3)")
    parser.add_argument("--patch_size", type=int, default=8, help="side of a patch, divides the resolution (default 8)")
    parser.add_argument("--dim", type=int, default=dim, help=f"width of the {network} (default {dim})")
    parser.add_argument("--steps", type=int, default=steps, help=f"training steps (default {steps})")
    parser.add_argument("--batch_size", type=int, default=128, help="default 128")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and what is held out (default 0)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")


def told_in_one_line(work: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Do the work; returns the exit code, 2 where it was refused with one line on stderr."""
    try:
        take_config(options)
        for name, least in LEAST.items():
            if getattr(options, name) < least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(options, name)}")
        if not 0 <= options.seed < 2**63:
            raise ValueError(f"--seed must be at least 0 and below 2^63, got {options.seed}")
        work(options)
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: pip install 'unet-attn[train]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def take_config(options: argparse.Namespace) -> None:
    """Settle how data is read (`options.reading`, of DataOptions), and its resolution and channels if not given."""
    data, unet = ({} if options.config is None else section_of(options.config, name) for name in ("data", "unet"))
    options.reading = reading_options(data, options.data)
    if options.resolution is None:
        options.resolution = data.get("resolution", 32)
    if options.channels is None:
        options.channels = unet.get("in_channels", 3)
    for value, name in ((options.resolution, "data.resolution"), (options.channels, "unet.in_channels")):
        if not isinstance(value, int):
            raise ValueError(f"{options.config}: {name} must be a whole number, got {value!r}")


def check_new_folder(folder: Path, option: str, data: Path) -> None:
    """Raise ValueError, naming the option, unless `folder` is empty or new, can be written, and is not in `data`."""
    if data.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise ValueError(f"{option} {folder} lies in the data folder, which is never written to: give another")
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{option} {folder} exists and is no empty folder, and nothing is written over: give another")
    check_folder(folder, option)


def near_doubles(pictures: "Tensor", *, trained: Sequence[int], held_out: Sequence[int]) -> "Tensor":
    """Which held-out pictures are near copies of a trained one: (number held out,) bool. pictures: (N, C, H, W)."""
    from unet_attn.measures import COPY_CORRELATION, nearest_pictures

    return nearest_pictures(pictures[held_out], pictures[trained]).correlation >= COPY_CORRELATION


def train(options: argparse.Namespace) -> None:
    # everything that can be refused is refused before minutes of training
    check_new_folder(options.out, "--out", options.data)
    import torch
    from sample import chosen_device

    from unet_attn.data import CaptionedImages, DataOptions
    from unet_attn.judge import Judge, JudgeSize, train_judge
    from unet_attn.measures import check_candidates
    from unet_attn.picture_model import caption_key, split_held_out
    from unet_attn.tokenizer import train_tokenizer

    device = chosen_device(options.device)
    data = CaptionedImages(
        DataOptions(path=str(options.data), resolution=options.resolution, caption_dropout=0.0, **options.reading),
        channels=options.channels,
    )
    items = [item for item in (data[index] for index in range(len(data))) if item["caption"]]
    captions = [item["caption"] for item in items]
    trained, held_out = split_held_out(len(items), options.seed)
    check_candidates(len(set(map(caption_key, captions))))
    pictures = torch.stack([item["image"] for item in items])

    torch.manual_seed(options.seed)  # initial weights and dropout
    # the words of held-out captions are known as they are to the judged model, whose vocabulary has them all
    size = JudgeSize(options.resolution, options.channels, options.patch_size, options.dim)
    judge = Judge(size, train_tokenizer(captions)).to(device)
    started = time.monotonic()
    with shown_progress(options.steps) as on_step:
        train_judge(
            judge,
            pictures[trained],
            [captions[index] for index in trained],
            steps=options.steps,
            batch_size=options.batch_size,
            seed=options.seed,
            on_step=on_step,
        )
    seconds = time.monotonic() - started

    figures = judged(judge, pictures, captions, trained=trained, held_out=held_out, seed=options.seed)
    judge.record = figures | {
        "held_out_pictures": len(held_out),
        "trained_pictures": len(trained),
        "data": str(options.data),
        "steps": options.steps,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "torch": torch.__version__,
    }
    judge.save(options.out)
    print(f"trained on {len(trained)} pictures in {seconds:.0f} s")
    print(told(judge.record))
    print(f"written to {options.out}")


def judged(
    judge: "Judge",
    pictures: "Tensor",
    captions: Sequence[str],
    *,
    trained: Sequence[int],
    held_out: Sequence[int],
    seed: int,
) -> dict[str, float | int | None]:
    """How often it finds the captions of pictures that it has not seen, and of as many that it has.

    pictures: (N, C, H, W), and their N captions; trained, held_out: numbers of pictures.
    """
    from unet_attn.judge import captions_found
    from unet_attn.measures import CANDIDATES, mean_with_error

    # from end to end: neighbours in a folder are alike
    seen_again = trained[:: len(trained) // len(held_out)][: len(held_out)]
    held, seen = (
        captions_found(judge, pictures[chosen], [captions[n] for n in chosen], captions, seed=seed)
        for chosen in (held_out, seen_again)
    )
    doubles = near_doubles(pictures, trained=trained, held_out=held_out)
    agreement = mean_with_error(held, seed=seed)
    without = None if doubles.all() else mean_with_error(held[~doubles], seed=seed)
    return {
        "held_out_agreement": agreement.value,
        "held_out_agreement_error": agreement.error,
        "held_out_near_doubles": int(doubles.sum()),
        "agreement_without_near_doubles": without and without.value,
        "agreement_without_near_doubles_error": without and without.error,
        "trained_agreement": seen.double().mean().item(),
        "candidates": CANDIDATES,
    }


def told(record: Mapping[str, Any]) -> str:
    """What a judge's record says of how good it is."""
    held, error, seen = (
        100 * record[name] for name in ("held_out_agreement", "held_out_agreement_error", "trained_agreement")
    )
    of, among = record["held_out_pictures"], record["candidates"]
    doubles, without = record["held_out_near_doubles"], record["agreement_without_near_doubles"]
    more = "" if without is None else f"; without them {100 * without:.1f} %"
    return (
        f"finds the caption of {held:.1f} +- {error:.1f} % of {of} held-out pictures among {among} (of trained ones "
        f"{seen:.1f} %, by chance {100 / among:.1f} %)\n"
        f"{doubles} of the {of} are near doubles of a trained picture{more if doubles else ''}"
    )


@contextmanager
def shown_progress(steps: int) -> Iterator[Callable[[int, float], None]]:
    """A bar on the terminal; yields what is to be called with the number of each step and its loss."""
    from tqdm import tqdm

    with tqdm(total=steps, unit="step", disable=not sys.stderr.isatty()) as bar:

        def on_step(step: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()

        yield on_step


if __name__ == "__main__":
    sys.exit(main())
