"""Do the measures see what they should? Real pictures, spoiled in known ways, measured against other real pictures.

    python scripts/sensitivity.py DIR --judge JUDGE

Prints the table of docs/evaluation.md. The pictures that the judge never saw stand for the sampled ones, the others for
the real ones, but for some that make up for what is dropped.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet_attn.conditioning import exchanged_captions
from unet_attn.data import CaptionedImages, DataOptions
from unet_attn.evaluation import MOST_REAL, check_counts, compare_features
from unet_attn.extractors import EfficientNetFeatures, Extractor, extract_features
from unet_attn.feature_cache import cached_features
from unet_attn.judge import Judge, JudgeFeatures, caption_agreement
from unet_attn.measures import Estimate, copy_rate, nearest_pictures
from unet_attn.picture_model import split_held_out

NOISE = 0.2  # standard deviation, where black is -1 and white +1


class Spoiled(NamedTuple):
    """Pictures (N, C, H, W) and their captions; what was done to them; the first `judged` are new to the judge."""

    name: str
    pictures: Tensor
    captions: list[str]
    judged: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DIR", type=Path, help="the pictures that the judge was trained on")
    parser.add_argument("--judge", type=Path, required=True, metavar="JUDGE")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    options = parser.parse_args()
    try:
        judge = Judge.load(options.judge)
        networks = {"EfficientNet": EfficientNetFeatures(), "judge": JudgeFeatures(judge)}
        print(sensitivity_table(options.data, judge, networks, seed=options.seed))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def sensitivity_table(path: Path, judge: Judge, networks: dict[str, nn.Module], *, seed: int) -> str:
    """A Markdown table: a row per way of spoiling, a column per measure; distances in the features of each network."""
    options = DataOptions(path=str(path), resolution=judge.size.image_size, caption_dropout=0.0)
    data = CaptionedImages(options, channels=judge.size.channels)
    items = [item for item in (data[index] for index in range(len(data))) if item["caption"]]
    pictures, captions = torch.stack([item["image"] for item in items]), [item["caption"] for item in items]
    # the judge's own split: what it never saw
    trained, held_out = split_held_out(len(items), int(judge.record["seed"]))
    order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(seed)).tolist()
    # enough to make up for a half that is dropped, when half of them are dropped as well
    spares = min(3 * len(held_out), len(trained) - len(held_out))
    spare = [trained[place] for place in order[:spares]]
    reference = [trained[place] for place in order[spares:]][:MOST_REAL]
    check_counts(real=len(reference), sampled=len(held_out))

    real = {
        name: cached_features(pictures[reference], Extractor(network, f"{name} of a sensitivity table"))
        for name, network in networks.items()
    }
    heads = [f"{measure}, {name}" for name in networks for measure in ("KID x 1000", "Frechet", "precision", "recall")]
    rows = [["", *heads, "agreement", "near copies"]]
    folders = [data.paths[item["index"]].parent.name for item in items]
    parts = {"held_out": held_out, "reference": reference, "spare": spare}
    for spoiled in spoiled_sets(pictures, captions, folders, **parts, seed=seed):
        row = [spoiled.name]
        for name, network in networks.items():
            row += distance_cells(real[name], extract_features(spoiled.pictures, network))
        first = slice(spoiled.judged)
        row.append(
            cell(caption_agreement(judge, spoiled.pictures[first], spoiled.captions[first], captions, seed=seed))
        )
        row.append(cell(copy_rate(nearest_pictures(spoiled.pictures, pictures[reference]))))
        rows.append(row)
        print(" | ".join(row), file=sys.stderr)
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def spoiled_sets(
    pictures: Tensor,
    captions: list[str],
    folders: list[str],
    *,
    held_out: list[int],
    reference: list[int],
    spare: list[int],
    seed: int,
) -> Iterator[Spoiled]:
    """The held-out pictures as they are, and spoiled in each way.

    A set is always of the same size: what is dropped is made up for by spare pictures, and left out where they are too
    few. folders: the name of the folder that each picture lies in.
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(held_out)
    mine, said = pictures[held_out], [captions[index] for index in held_out]
    yield Spoiled("real", mine, said, count)

    word, folder = most_frequent(words(said)), most_frequent(folders[index] for index in held_out)
    for name, dropped in (
        (f"without {word!r} in the caption", {n for n, caption in enumerate(captions) if word in words([caption])}),
        (f"without the folder {folder!r}", {n for n, each in enumerate(folders) if each == folder}),
    ):
        kept, fill = ([index for index in each if index not in dropped] for each in (held_out, spare))
        without = (kept + fill)[:count]
        if len(without) == count:
            yield Spoiled(name, pictures[without], [captions[index] for index in without], len(kept))

    noise = torch.randn(mine.shape, generator=generator)
    yield Spoiled(f"noise of {NOISE}", (mine + NOISE * noise).clamp(-1, 1), said, count)
    blurred = F.avg_pool2d(F.pad(mine, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    yield Spoiled("blurred, 3 x 3", blurred, said, count)
    yield Spoiled("captions exchanged", mine, exchanged_captions(said, seed=seed), count)
    yield Spoiled("one picture for all", mine[:1].expand_as(mine), said, count)

    half = held_out[1::2] + reference[: count - count // 2]
    yield Spoiled("half are copies", pictures[half], [captions[index] for index in half], count // 2)


def words(captions: list[str]) -> list[str]:
    return [word for caption in captions for word in caption.split()]


def most_frequent(names: Iterable[str]) -> str:
    return Counter(names).most_common(1)[0][0]


def distance_cells(real: Tensor, sampled: Tensor) -> list[str]:
    distances = compare_features(real, sampled)
    return [
        cell(Estimate(1000 * distances.kid, 1000 * distances.kid_error), digits=2),
        cell(Estimate(distances.frechet, distances.frechet_error), digits=2),
        cell(Estimate(distances.precision, distances.precision_error)),
        cell(Estimate(distances.recall, distances.recall_error)),
    ]


def cell(estimate: Estimate, *, digits: int = 3) -> str:
    return f"{estimate.value:.{digits}f} ± {estimate.error:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
