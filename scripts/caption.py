"""Captions for pictures that have none: a captioner learns from those of a folder that have one.

    python scripts/caption.py DIR [--out FILE] [--judge JUDGE]

The proposals go to a new file beside DIR, a line each with a confidence, the surest first, for you to read through; DIR
itself is never written to. How good they are is measured on captioned pictures that are held out, against one caption
for all, printed, and written beside as JSON. How to use the file: docs/captions.md.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _folder import check_file
from train_judge import add_training_options, check_new_folder, near_doubles, shown_progress, told_in_one_line

from unet_attn.metadata import METADATA_NAMES

if TYPE_CHECKING:  # they take seconds to import, which a wrong command line need not wait for
    from torch import Tensor

    from unet_attn.captioner import Captioner, Proposal
    from unet_attn.data import CaptionedImages
    from unet_attn.judge import Judge
    from unet_attn.measures import Estimate

LABELS = {
    "token_accuracy": "token accuracy",
    "exact_match": "exact match",
    "exact_match_surer_half": "  of the surer half",
    "exact_match_other_half": "  of the other half",
    "exact_match_without_doubles": "  without near doubles",
    "confidence": "mean confidence",
    "agreement": "agreement by the judge",
    "agreement_surer_half": "  of the surer half",
    "agreement_other_half": "  of the other half",
    "agreement_without_doubles": "  without near doubles",
}
COLUMNS = {"captioner": "captioner", "most_frequent": "one for all", "true": "true captions"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DIR", type=Path, help="pictures, some of them captioned")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the proposals (default DIR.captions.jsonl, beside DIR)"
    )
    parser.add_argument("--judge", type=Path, metavar="JUDGE", help="a judge of this data, for the agreement")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the trained captioner there, a new folder")
    add_training_options(parser, network="captioner", dim=64, steps=1500)
    return told_in_one_line(caption, parser.parse_args())


def caption(options: argparse.Namespace) -> None:
    # everything that can be refused is refused before minutes of training
    out, scores_path = chosen_files(options)
    import torch
    from sample import chosen_device

    from unet_attn.captioner import Captioner, CaptionerSize, propose, train_captioner
    from unet_attn.picture_model import split_held_out
    from unet_attn.tokenizer import train_tokenizer

    device = chosen_device(options.device)
    data = read_pictures(options)
    captioned = [index for index, variants in enumerate(data.captions) if variants]
    wanted = [index for index, variants in enumerate(data.captions) if not variants]
    captions = [data.captions[index][0] for index in captioned]
    trained, held_out = split_held_out(len(captioned), options.seed)
    judge = chosen_judge(options, captions, device)
    alike = None if judge is None else trained_alike(judge, options, trained=len(trained), held_out=len(held_out))
    if alike is False:
        print(told_of_other_split(judge, options), file=sys.stderr)

    torch.manual_seed(options.seed)  # initial weights
    size = CaptionerSize(options.resolution, options.channels, options.patch_size, options.dim)
    # what is held out is held out of the vocabulary too: the pictures without captions may need new words as well
    captioner = Captioner(size, train_tokenizer(captions[index] for index in trained)).to(device)
    pictures = torch.stack([data[index]["image"] for index in captioned])
    started = time.monotonic()
    with shown_progress(options.steps) as on_step:
        train_captioner(
            captioner,
            pictures[trained],
            [captions[index] for index in trained],
            steps=options.steps,
            batch_size=options.batch_size,
            seed=options.seed,
            on_step=on_step,
        )
    seconds = time.monotonic() - started

    doubled = near_doubles(pictures, trained=trained, held_out=held_out).tolist()
    scores = held_out_scores(
        captioner, pictures, captions, trained=trained, held_out=held_out, doubled=doubled, judge=judge
    )
    captioner.record = record_of(options, scores, seconds=seconds) | {
        "trained_pictures": len(trained),
        "held_out_pictures": len(held_out),
        "held_out_near_doubles": sum(doubled),
        "judge_trained_alike": alike,
    }
    print(
        f"trained on {len(trained)} pictures in {seconds:.0f} s; on {len(held_out)} that were held out, "
        f"{sum(doubled)} of them near doubles of a trained one:"
    )
    print(table(scores))
    write_new(scores_path, json.dumps(captioner.record, indent=2, allow_nan=False) + "\n")
    if options.save is not None:
        captioner.save(options.save)
    if not wanted:
        print(f"all {len(captioned)} pictures have captions: there is nothing to propose; scores in {scores_path}")
        return
    proposals = propose(captioner, torch.stack([data[index]["image"] for index in wanted]))
    write_new(out, proposal_lines([file_name(data, index) for index in wanted], proposals))
    print(f"{len(wanted)} proposals in {out}, the surest first; scores in {scores_path.name}")


# --------------------------------------------------------------------------------------------- what is read and refused


def chosen_files(options: argparse.Namespace) -> tuple[Path, Path]:
    """Where proposals and scores go. Raises ValueError for a place where they would lie in the way of something."""
    folder = options.data.resolve()
    out = folder.with_name(f"{folder.name}.captions.jsonl") if options.out is None else options.out
    if out.name.lower() in METADATA_NAMES or folder in out.resolve().parents:
        raise ValueError(
            f"{out} would become training data before anyone has read it: give an --out outside {options.data} that is "
            "not called metadata"
        )
    scores = out.with_name(f"{out.stem}.scores.json")
    for path in (out, scores):
        if os.path.lexists(path):
            raise ValueError(f"{path} exists already and is never written over: give another --out, or move it away")
        check_file(path, "--out")
        if options.save is not None and one_in_the_other(path.resolve(), options.save.resolve()):
            raise ValueError(f"--save {options.save} is in the way of {path}: give another folder")
    if options.save is not None:
        check_new_folder(options.save, "--save", options.data)
    return out, scores


def one_in_the_other(a: Path, b: Path) -> bool:
    return a in (b, *b.parents) or b in a.parents


def read_pictures(options: argparse.Namespace) -> "CaptionedImages":
    """The pictures with and without captions. Raises ValueError for a data set that has no captions, or no files."""
    from unet_attn.data import CaptionedImages, DataOptions
    from unet_attn.tables import is_table

    data_options = DataOptions(
        path=str(options.data), resolution=options.resolution, caption_dropout=0.0, **options.reading
    )
    if options.data.exists() and is_table(data_options):
        raise ValueError(f"{options.data} is a table with pictures inside; captions are proposed for a folder of files")
    data = CaptionedImages(data_options, channels=options.channels, require_captions=False)
    if not any(data.captions):
        raise ValueError(
            f"none of the {len(data)} pictures in {options.data} has a caption to learn from: caption some first, "
            "200 at least (docs/data.md says how)"
        )
    return data


def chosen_judge(options: argparse.Namespace, captions: Sequence[str], device: object) -> "Judge | None":
    """The judge asked for. Raises ValueError if it is not of this size, or cannot judge these captions."""
    if options.judge is None:
        return None
    from unet_attn.judge import Judge
    from unet_attn.measures import check_candidates
    from unet_attn.picture_model import caption_key

    judge = Judge.load(options.judge)
    size = judge.size
    if (size.image_size, size.channels) != (options.resolution, options.channels):
        raise ValueError(
            f"the judge {options.judge} sees pictures of {size.image_size} px in {size.channels} channels, this "
            f"captioner {options.resolution} px in {options.channels}: give --resolution {size.image_size} "
            f"--channels {size.channels}, or another judge"
        )
    check_candidates(len(set(map(caption_key, captions))))
    return judge.to(device)


def trained_alike(judge: "Judge", options: argparse.Namespace, *, trained: int, held_out: int) -> bool:
    """Whether the judge learned from the same part of the same data, so that it has not seen what is held out here."""
    split = {"seed": options.seed, "trained_pictures": trained, "held_out_pictures": held_out}
    data = judge.record.get("data")
    same_data = isinstance(data, str) and Path(data).resolve() == options.data.resolve()
    return same_data and all(judge.record.get(name) == value for name, value in split.items())


def told_of_other_split(judge: "Judge", options: argparse.Namespace) -> str:
    parts = (judge.record.get(name, "unknown") for name in ("data", "seed", "trained_pictures"))
    data, seed, count = (" ".join(str(part).split()) for part in parts)
    return (
        f"warning: the judge {options.judge} learned from other pictures (data {data}, seed {seed}, {count} pictures): "
        "it may know some that are held out here, and then all its agreements are too high, those of the true captions "
        f"too; train it on {options.data} as it is now with --seed {options.seed}"
    )


# -------------------------------------------------------------------------------------------------------------- scoring


def held_out_scores(
    captioner: "Captioner",
    pictures: "Tensor",
    captions: Sequence[str],
    *,
    trained: Sequence[int],
    held_out: Sequence[int],
    doubled: Sequence[bool],
    judge: "Judge | None",
) -> "dict[str, dict[str, Estimate]]":
    """How good the captions of held-out pictures are, by who gave them and measure.

    pictures: (N, C, H, W), and their N captions; trained, held_out: numbers of pictures; doubled: which of those held
    out are near doubles of a trained one. What would be measured on no picture is left out.
    """
    from unet_attn.captioner import constant_token_accuracy, exact_match, propose, token_accuracy
    from unet_attn.measures import mean_with_error

    mine, true = pictures[held_out], [captions[index] for index in held_out]
    constant = Counter(captions[index] for index in trained).most_common(1)[0][0]
    proposals = propose(captioner, mine)
    confidence = mine.new_tensor([proposal.confidence for proposal in proposals])
    scores = {
        "captioner": {
            "token_accuracy": token_accuracy(captioner, mine, true),
            "confidence": mean_with_error(confidence),
        },
        "most_frequent": {"token_accuracy": constant_token_accuracy(captioner.tokenizer, constant, true)},
        "true": {},
    }

    said = {
        "captioner": [proposal.caption for proposal in proposals],
        "most_frequent": [constant] * len(true),
        "true": true,
    }
    order = confidence.argsort(descending=True, stable=True).tolist()
    half = len(order) // 2
    parts = {"": sorted(order), "_surer_half": order[:half], "_other_half": order[half:]}
    parts["_without_doubles"] = [n for n in sorted(order) if not doubled[n]]
    for part, chosen in parts.items():
        if not chosen:
            continue
        for who, texts in said.items():
            here = [texts[n] for n in chosen]
            if who != "true":
                scores[who][f"exact_match{part}"] = exact_match(here, [true[n] for n in chosen])
            if judge is not None:
                from unet_attn.judge import caption_agreement

                scores[who][f"agreement{part}"] = caption_agreement(judge, mine[chosen], here, captions)
    return {who: each for who, each in scores.items() if each}


def table(scores: "Mapping[str, Mapping[str, Estimate]]") -> str:
    lines = [" " * 24 + "".join(f"{COLUMNS[who]:18}" for who in scores)]
    for measure, label in LABELS.items():
        cells = [
            f"{each[measure].value:.3f} +- {each[measure].error:.3f}" if measure in each else ""
            for each in scores.values()
        ]
        if any(cells):
            lines.append(f"{label:24}" + "".join(f"{cell:18}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def record_of(
    options: argparse.Namespace,
    scores: "Mapping[str, Mapping[str, Estimate]]",
    *,
    seconds: float,
) -> dict[str, Any]:
    """What the result file and the saved captioner say of how it was trained and how good it is, but for the counts."""
    import torch

    return {
        "scores": {
            who: {measure: estimate._asdict() for measure, estimate in each.items()} for who, each in scores.items()
        },
        "data": str(options.data),
        "judge": None if options.judge is None else str(options.judge),
        "steps": options.steps,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "torch": torch.__version__,
    }


# -------------------------------------------------------------------------------------------------------------- writing


def file_name(data: "CaptionedImages", index: int) -> str:
    """What a table at the top of the folder calls a picture."""
    return data.paths[index].relative_to(data.options.path).as_posix()


def proposal_lines(names: Sequence[str], proposals: "Sequence[Proposal]") -> str:
    """A line of JSON for each picture, the surest first: file_name, text and confidence."""
    rows = sorted(zip(names, proposals, strict=True), key=lambda row: (-row[1].confidence, row[0]))
    return "".join(
        json.dumps(
            {"file_name": name, "text": each.caption, "confidence": round(each.confidence, 4)}, ensure_ascii=False
        )
        + "\n"
        for name, each in rows
    )


def write_new(path: Path, text: str) -> None:
    """Write a file that is complete or absent. Raises FileExistsError rather than to write over one."""
    try:
        # a name with bytes that are no text becomes JSON's own escape
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except FileExistsError:
        raise
    except OSError:
        path.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
