"""What evaluate.py reads and checks before it computes anything: pictures, captions, judge and feature network."""

import argparse
import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from _reading import reading_options, section_of
from sample import chosen_steps

if TYPE_CHECKING:  # they take seconds to import, which a wrong command line need not wait for
    import torch

    from unet_attn.data import CaptionedImages
    from unet_attn.extractors import Extractor
    from unet_attn.judge import Judge
    from unet_attn.pipelines.text_to_image import TextToImagePipeline

OUR_KEYS = {"kid", "frechet", "extractor", "seeds"}  # of every evaluation.json since the first release
MOST_FOR_COLOUR = 64  # pictures
COLOURED = 16  # of 255: how far the channels of a pixel are apart; grey that was compressed as JPEG stays below


class Plan(NamedTuple):
    """What is to be measured, and with what: read and checked, and nothing computed yet."""

    data: "CaptionedImages"
    training: "CaptionedImages | None"
    chosen: list[int]  # the pictures of `data` whose captions are sampled
    captions: list[str]
    reference: list[int]  # the pictures of `data` to compare with
    made_for: "torch.Tensor | None"  # see unet_attn.measures; None = a model without text
    steps: int
    judge: "Judge | None"
    extractor: "Extractor"


def check_sampling(options: argparse.Namespace) -> None:
    """Refuse what nothing can be sampled with, whatever the run and the data are."""
    if options.batch_size < 1:
        raise ValueError(f"--batch_size must be at least 1, got {options.batch_size}")
    if not 0 <= options.seed < 2**63 - max(0, options.num_pictures):
        raise ValueError(f"--seed must be at least 0 and below 2^63, got {options.seed}")


def prepared(options: argparse.Namespace, pipeline: "TextToImagePipeline", device: "torch.device") -> Plan:
    """Read what the command line names. Raises ValueError or OSError for all that cannot be measured."""
    import torch

    from unet_attn.evaluation import MIN_PICTURES, MOST_REAL, check_counts, choose_pictures
    from unet_attn.extractors import Given, make_extractor
    from unet_attn.judge import caption_key
    from unet_attn.measures import check_candidates

    check_counts(sampled=options.num_pictures)
    has_text = pipeline.text_encoder is not None
    judge = chosen_judge(options, pipeline, device)
    extractor = make_extractor(options.features, Given(judge, options.inception_weights))
    extractor.network.to(device)
    training_path = data_section(options.run).get("path")
    here = training_path is not None and Path(training_path).exists()
    same = here and Path(training_path).resolve() == options.data_path.resolve()
    data = read_pictures(options.data_path, options.run, pipeline, trained_on=same)
    training = data if same else None
    if here and not same:
        training = read_pictures(Path(training_path), options.run, pipeline, trained_on=True)

    # without a caption there is nothing to sample for; the others alone are compared, as they may differ
    usable = [index for index, variants in enumerate(data.captions) if variants or not has_text]
    if len(usable) < min(MIN_PICTURES, len(data)):
        few = f"{len(usable)} of the {len(data)} pictures in {options.data_path} have a caption"
        raise ValueError(f"{few}: {MIN_PICTURES} are needed to measure a distance")
    check_counts(real=len(usable))
    chosen, reference = (
        [usable[place] for place in choose_pictures(len(usable), count, options.seed)]
        for count in (options.num_pictures, min(MOST_REAL, len(usable)))
    )
    # both begin with the same pictures: the number of a caption is its place in the reference
    made_for = torch.arange(options.num_pictures) % len(usable) if has_text else None
    if judge is not None and has_text:
        check_candidates(len(set(map(caption_key, known_captions(data)))))
    steps = chosen_steps(options.steps, pipeline)
    captions = [next(iter(data.captions[index]), "") for index in chosen]
    return Plan(data, training, chosen, captions, reference, made_for, steps, judge, extractor)


def read_pictures(path: Path, run: Path, pipeline: "TextToImagePipeline", *, trained_on: bool) -> "CaptionedImages":
    """The data set as the run would read it: same size, channels, background, and, if it is its own, held-out part."""
    from unet_attn.data import CaptionedImages, DataOptions

    section = data_section(run)
    held_out = {"validation_share": section["validation_share"]} if trained_on and "validation_share" in section else {}
    options = DataOptions(
        path=str(path),
        resolution=pipeline.unet.config.sample_size,
        caption_dropout=0.0,
        **reading_options(section, path),
        **held_out,
    )
    return CaptionedImages(
        options, channels=pipeline.unet.config.out_channels, require_captions=pipeline.text_encoder is not None
    )


def data_section(run: Path) -> dict[str, Any]:
    """What the run's config says of its data; empty for a pipeline without one."""
    config = run / "config.yaml"
    return section_of(config, "data") if config.exists() else {}


def chosen_judge(
    options: argparse.Namespace, pipeline: "TextToImagePipeline", device: "torch.device"
) -> "Judge | None":
    if options.judge is None:
        return None
    from unet_attn.judge import Judge

    judge = Judge.load(options.judge)
    if pipeline.text_encoder is None and options.features != "judge":
        raise ValueError(f"{options.run} was trained without text: there is no agreement with captions for --judge")
    return judge.to(device)


def known_captions(data: "CaptionedImages") -> list[str]:
    return [variants[0] for variants in data.captions if variants]


def held_out_share(judge: "Judge", data: "CaptionedImages") -> float | None:
    """How often the judge finds captions that it was not trained on, if it was trained on the other pictures of `data`.

    Of other data it says nothing. None also where the judge's record does not tell.
    """
    record = judge.record
    counts = [record.get(name) for name in ("trained_pictures", "held_out_pictures")]
    share, path = record.get("held_out_agreement"), record.get("data")
    if not isinstance(share, float) or not isinstance(path, str) or not all(isinstance(n, int) for n in counts):
        return None
    same = Path(path).resolve() == Path(data.options.path).resolve() and sum(counts) == len(known_captions(data))
    return share if same else None


def some_in_colour(data: "CaptionedImages", places: list[int]) -> bool:
    """Whether a grey model is held against coloured pictures; of the first 64 of these."""
    import numpy as np

    from unet_attn.items import decode

    for place in places[:MOST_FOR_COLOUR] if data.channels == 1 else []:
        pixels = np.asarray(decode(BytesIO(data.encoded(place)), data.options, channels=3), dtype=np.int16)
        if (pixels.max(axis=-1) - pixels.min(axis=-1)).max() > COLOURED:
            return True
    return False


# ----------------------------------------------------------------------------------------------- where the figures go


class Outputs(NamedTuple):
    """The files of an evaluation. Those that are there are an earlier evaluation's."""

    figures: Path
    chart: Path
    sheet: Path


def chosen_outputs(options: argparse.Namespace) -> Outputs:
    """Where the figures go. Raises ValueError or OSError if they cannot, or if a file is there that is not ours."""
    path = options.json or options.run / "evaluation.json"
    if path.suffix != ".json":
        raise ValueError(f"--json must name a file that ends in .json, got {path}")
    if options.json is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for --json {path}")
    outputs = Outputs(path, path.with_suffix(".svg"), path.with_name(f"{path.stem}_nearest.png"))
    ours = files_of_evaluation(outputs)
    for each in outputs:
        if each.name not in ours and each.exists():
            raise FileExistsError(
                f"{each} is not from an earlier evaluation: move it away, or name another --json FILE"
            )
    return outputs


def files_of_evaluation(outputs: Outputs) -> list[str]:
    """The names of the files that an earlier evaluation wrote there."""
    try:
        earlier = json.loads(outputs.figures.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(earlier, dict) or not earlier.keys() >= OUR_KEYS:
        return []
    beside = earlier.get("files", [outputs.chart.name, outputs.sheet.name])  # older releases kept no list
    return [outputs.figures.name, *(beside if isinstance(beside, list) else [])]
