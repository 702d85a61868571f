"""Train a judge of your own captioned pictures: it learns which caption belongs to which picture.

    python scripts/train_judge.py DIR --out runs/judge

A tenth of the pictures is held out. How often the judge finds their captions among 100 is printed, and kept with it:
sampled pictures cannot be expected to do better. Then: python scripts/evaluate.py RUN --judge runs/judge ...
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DIR", type=Path, help="captioned pictures")
    parser.add_argument("--out", type=Path, required=True, metavar="JUDGE", help="folder for the judge")
    add_training_options(parser, network="image transformer", dim=48, steps=900)
    return told_in_one_line(train, parser.parse_args())


def add_training_options(parser: argparse.ArgumentParser, *, network: str, dim: int, steps: int) -> None:
    """What the training of a small network on pictures asks for; `network` is what has the width `dim`."""
    parser.add_argument("--resolution", type=int, default=32, help="side in pixels (default 32)")
    parser.add_argument("--channels", type=int, choices=(1, 3), default=3, help="1 = grey, 3 = colour (default 3)")
    parser.add_argument("--patch_size", type=int, default=8, help="side of a patch, divides the resolution (default 8)")
    parser.add_argument("--dim", type=int, default=dim, help=f"width of the {network} (default {dim})")
    parser.add_argument("--steps", type=int, default=steps, help=f"training steps (default {steps})")
    parser.add_argument("--batch_size", type=int, default=128, help="default 128")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and what is held out (default 0)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")


def told_in_one_line(work: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Do the work; returns the exit code, 2 where it was refused with one line on stderr."""
    try:
        for name in ("steps", "batch_size"):
            if getattr(options, name) < 2:
                raise ValueError(f"--{name} must be at least 2, got {getattr(options, name)}")
        work(options)
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: pip install 'unet-attn[train]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def train(options: argparse.Namespace) -> None:
    import torch
    from sample import chosen_device

    from unet_attn.data import CaptionedImages, DataOptions
    from unet_attn.judge import Judge, JudgeSize, caption_agreement, train_judge
    from unet_attn.measures import CANDIDATES, check_candidates
    from unet_attn.picture_model import caption_key, split_held_out
    from unet_attn.tokenizer import train_tokenizer

    device = chosen_device(options.device)
    data = CaptionedImages(
        DataOptions(path=str(options.data), resolution=options.resolution, caption_dropout=0.0),
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

    # as many of those it was trained on, from end to end: neighbours in a folder are alike
    seen_again = trained[:: len(trained) // len(held_out)][: len(held_out)]
    held, seen = (
        caption_agreement(judge, pictures[chosen], [captions[n] for n in chosen], captions, seed=options.seed)
        for chosen in (held_out, seen_again)
    )
    judge.record = {
        "held_out_agreement": held.value,
        "held_out_agreement_error": held.error,
        "trained_agreement": seen.value,
        "candidates": CANDIDATES,
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
    print(
        f"finds the caption of {100 * held.value:.1f} +- {100 * held.error:.1f} % of {len(held_out)} held-out pictures "
        f"among {CANDIDATES} (of trained ones {100 * seen.value:.1f} %, by chance {100 / CANDIDATES:.1f} %)"
    )
    print(f"written to {options.out}")


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
