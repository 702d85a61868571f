"""What evaluate.py reads and checks before it computes anything: pictures, captions, judge and feature network."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sample import chosen_steps

if TYPE_CHECKING:  # they take seconds to import, which a wrong command line need not wait for
    import torch

    from unet_attn.data import CaptionedImages
    from unet_attn.extractors import Extractor
    from unet_attn.judge import Judge
    from unet_attn.pipelines.text_to_image import TextToImagePipeline

# how the run's pictures and captions were read
DATA_KEYS = ("caption_extension", "class_template", "text_column", "image_column", "split")
DATA_KEYS += ("background", "on_error", "max_pixels")


class Plan(NamedTuple):
    """What is to be measured, and with what: read and checked, and nothing computed yet."""

    data: "CaptionedImages"
    training: "CaptionedImages | None"
    chosen: list[int]  # the pictures of `data` whose captions are sampled
    captions: list[str]
    steps: int
    judge: "Judge | None"
    extractor: "Extractor"


def prepared(options: argparse.Namespace, pipeline: "TextToImagePipeline", device: "torch.device") -> Plan:
    """Read what the command line names. Raises ValueError or OSError for all that cannot be measured."""
    from unet_attn.evaluation import check_counts, choose_pictures
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

    chosen = choose_pictures(len(data), options.num_pictures, options.seed)
    check_counts(real=len(set(chosen)))
    if judge is not None and has_text:
        check_candidates(len(set(map(caption_key, known_captions(data)))))
    steps = chosen_steps(options.steps, pipeline.scheduler.config.num_train_timesteps)
    captions = [next(iter(data.captions[index]), "") for index in chosen]
    if judge is not None and has_text and not any(captions):
        raise ValueError("none of the chosen pictures has a caption to agree with: take more by --num_pictures")
    return Plan(data, training, chosen, captions, steps, judge, extractor)


def read_pictures(path: Path, run: Path, pipeline: "TextToImagePipeline", *, trained_on: bool) -> "CaptionedImages":
    """The data set as the run would read it: same size, channels, background, and, if it is its own, held-out part."""
    from unet_attn.data import CaptionedImages, DataOptions

    section = data_section(run)
    keys = (*DATA_KEYS, "validation_share") if trained_on else DATA_KEYS
    options = DataOptions(
        path=str(path),
        resolution=pipeline.unet.config.sample_size,
        caption_dropout=0.0,
        **{key: section[key] for key in keys if key in section},
    )
    return CaptionedImages(
        options, channels=pipeline.unet.config.out_channels, require_captions=pipeline.text_encoder is not None
    )


def data_section(run: Path) -> dict[str, Any]:
    """What the run's config says of its data; empty for a pipeline without one."""
    import yaml

    config = run / "config.yaml"
    try:
        return yaml.safe_load(config.read_text(encoding="utf-8"))["data"] if config.exists() else {}
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"{config} is no configuration of a run: {error}") from error


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
