"""How good a run's pictures are, and whether it uses its captions. What each figure can tell: docs/evaluation.md.

    python scripts/evaluate.py RUN --data.path DIR [--judge JUDGE]

Samples one picture for each of --num_pictures captions of DIR and compares them with the pictures of those captions.
The figures go to RUN/evaluation.json with all that is needed to repeat them, a plot of the loss to RUN/evaluation.svg;
compare only runs measured the same way. A judge (scripts/train_judge.py) adds the agreement with the captions.
"""

import argparse
import json
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they take seconds to import, which a wrong command line need not wait for
    from collections.abc import Iterator

    from torch import Tensor

    from unet_attn.conditioning import ConditioningGap
    from unet_attn.data import CaptionedImages
    from unet_attn.judge import Judge
    from unet_attn.pipelines.text_to_image import TextToImagePipeline

# how the run's pictures and captions were read
DATA_KEYS = ("caption_extension", "class_template", "text_column", "image_column", "split")
DATA_KEYS += ("background", "on_error", "max_pixels")
MOST_FOR_LOSS = 256  # pictures; each takes 15 passes through the network, and the differences are paired


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or any saved pipeline")
    parser.add_argument("--data.path", dest="data_path", type=Path, required=True, metavar="DIR", help="real pictures")
    parser.add_argument("--judge", type=Path, metavar="JUDGE", help="a judge of this data, for the caption agreement")
    parser.add_argument(
        "--features",
        choices=("efficientnet", "judge"),
        default="efficientnet",
        help="the network in whose features distances are measured (default efficientnet)",
    )
    parser.add_argument("--num_pictures", type=int, default=512, help="pictures to sample (default 512)")
    parser.add_argument("--seed", type=int, default=0, help="picture n starts from seed + n (default 0)")
    parser.add_argument("--steps", type=int, default=25, help="sampling steps (default 25)")
    parser.add_argument("--guidance_scale", type=float, default=3.0, help="default 3.0")
    parser.add_argument("--batch_size", type=int, default=64, help="pictures at a time (default 64); changes no result")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go (default RUN/evaluation.json)")
    options = parser.parse_args()
    try:
        evaluate(options)
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: pip install 'unet-attn[train,eval]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def evaluate(options: argparse.Namespace) -> None:
    if options.batch_size < 1:
        raise ValueError(f"--batch_size must be at least 1, got {options.batch_size}")
    if options.features == "judge" and options.judge is None:
        raise ValueError("--features judge needs --judge, a judge of this data: train one with scripts/train_judge.py")
    import torch
    from sample import chosen_device

    from unet_attn.conditioning import conditioning_gap
    from unet_attn.evaluation import check_counts, choose_pictures, compare_features, extract_features
    from unet_attn.judge import caption_key
    from unet_attn.measures import check_candidates
    from unet_attn.pipelines.text_to_image import TextToImagePipeline

    # everything that can be refused is refused before minutes of sampling
    device = chosen_device(options.device)
    pipeline = TextToImagePipeline.from_pretrained(options.run).to(device)
    has_text = pipeline.text_encoder is not None
    judge = chosen_judge(options, pipeline, device)
    extractor, extractor_size, extractor_name = chosen_extractor(options, judge, device)
    data = read_pictures(options.data_path, options.run, pipeline)
    training = training_pictures(options, data, pipeline)
    chosen = choose_pictures(len(data), options.num_pictures, options.seed)
    check_counts(real=len(set(chosen)), sampled=len(chosen))
    if judge is not None and has_text:
        check_candidates(len(set(map(caption_key, known_captions(data)))))
    captions = [data[index]["caption"] for index in chosen]
    distinct = sorted(set(chosen))
    for_loss = [n for n in dict.fromkeys(chosen) if data.captions[n] or not has_text][:MOST_FOR_LOSS]

    seconds: dict[str, float] = {}
    with timed(seconds, "loss"):
        pictures = torch.stack([data[index]["image"] for index in for_loss])
        texts = [data[index]["caption"] for index in for_loss]
        gap = conditioning_gap(pipeline, pictures, texts, seed=options.seed, batch_size=options.batch_size)
    with timed(seconds, "sampling"):
        sampled = torch.stack(sample_all(options, pipeline, captions))
    with timed(seconds, "features"):
        real_features = extract_features((data[n]["image"] for n in distinct), extractor, size=extractor_size)
        sampled_features = extract_features(sampled, extractor, size=extractor_size)
    with timed(seconds, "measures"):
        figures: dict[str, Any] = asdict(compare_features(real_features, sampled_features, seed=options.seed))
        figures["loss"] = gap_figures(gap) | {"on_training_data": None if training is None else training is data}
        figures["copies"] = copy_figures(options, sampled, training)
        if judge is not None and has_text:
            figures["agreement"] = agreement_figures(options, judge, sampled, captions, data)

    print(table(figures))
    print(f"measuring took {100 * (1 - seconds['sampling'] / sum(seconds.values())):.0f} % of the time")
    path = options.json or options.run / "evaluation.json"
    settings = settings_of(options, pipeline, extractor_name)
    write_text(path, json.dumps({**figures, **settings, "seconds": seconds}, indent=2, allow_nan=False) + "\n")
    write_text(path.with_suffix(".svg"), loss_chart(gap))
    print(f"written to {path} and {path.with_suffix('.svg').name}")


# --------------------------------------------------------------------------------------------------------- what is read


def read_pictures(path: Path, run: Path, pipeline: "TextToImagePipeline") -> "CaptionedImages":
    """The data set as the run would read it: same size, channels and background."""
    from unet_attn.data import CaptionedImages, DataOptions

    section = data_section(run)
    options = DataOptions(
        path=str(path),
        resolution=pipeline.unet.config.sample_size,
        caption_dropout=0.0,
        **{key: section[key] for key in DATA_KEYS if key in section},
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


def training_pictures(
    options: argparse.Namespace, data: "CaptionedImages", pipeline: "TextToImagePipeline"
) -> "CaptionedImages | None":
    """What the run was trained on, where copies are looked for: `data` itself, another set, or None = not here."""
    path = data_section(options.run).get("path")
    if path is None or not Path(path).exists():
        return None
    if Path(path).resolve() == options.data_path.resolve():
        return data
    return read_pictures(Path(path), options.run, pipeline)


def chosen_judge(options: argparse.Namespace, pipeline: "TextToImagePipeline", device: object) -> "Judge | None":
    if options.judge is None:
        return None
    from unet_attn.judge import Judge

    judge = Judge.load(options.judge)
    if pipeline.text_encoder is None and options.features != "judge":
        raise ValueError(f"{options.run} was trained without text: there is no agreement with captions for --judge")
    return judge.to(device)


def known_captions(data: "CaptionedImages") -> list[str]:
    return [variants[0] for variants in data.captions if variants]


def chosen_extractor(
    options: argparse.Namespace, judge: "Judge | None", device: object
) -> "tuple[torch.nn.Module, int, str]":  # noqa: F821  torch is imported late
    """The feature network, the side in pixels that it wants, and its name in the result file."""
    if options.features == "judge":
        from unet_attn.judge import JudgeFeatures

        return JudgeFeatures(judge), judge.size.image_size, f"the image transformer of the judge {options.judge}"
    from unet_attn.evaluation import EXTRACTOR, EXTRACTOR_SIZE, EfficientNetFeatures

    return EfficientNetFeatures().to(device), EXTRACTOR_SIZE, EXTRACTOR


# ----------------------------------------------------------------------------------------------------- what is measured


@contextmanager
def timed(seconds: dict[str, float], name: str) -> "Iterator[None]":
    started = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - started, 2)


def sample_all(options: argparse.Namespace, pipeline: "TextToImagePipeline", captions: list[str]) -> "list[Tensor]":
    from tqdm import tqdm

    from unet_attn.evaluation import sample_pictures

    pipeline.set_progress_bar_config(disable=True)
    pictures = sample_pictures(
        pipeline,
        captions,
        seed=options.seed,
        num_inference_steps=options.steps,
        guidance_scale=options.guidance_scale,
        batch_size=options.batch_size,
    )
    return list(tqdm(pictures, total=len(captions), desc="sampling", unit="picture", disable=not sys.stderr.isatty()))


def gap_figures(gap: "ConditioningGap") -> dict[str, Any]:
    """The gap as the result file has it: an estimate as {value, error}, without those that a model cannot have."""
    return {name: as_figure(value) for name, value in vars(gap).items() if value is not None}


def as_figure(value: object) -> object:
    return value._asdict() if hasattr(value, "_asdict") else value


def copy_figures(options: argparse.Namespace, sampled: "Tensor", training: "CaptionedImages | None") -> dict[str, Any]:
    """Near copies of training pictures, and as a yardstick how many of those are near copies of one another."""
    if training is None:
        return {"skipped": "the run's training pictures are not here"}
    import torch

    from unet_attn.evaluation import choose_pictures
    from unet_attn.measures import COPY_CORRELATION, copy_rate, nearest_pictures

    others = torch.stack([training[index]["image"] for index in range(len(training))])
    own = torch.tensor(choose_pictures(len(training), min(len(sampled), len(training)), options.seed))
    among_training = nearest_pictures(others[own], others, own=own)
    return {
        "rate": as_figure(copy_rate(nearest_pictures(sampled, others), seed=options.seed)),
        "rate_among_training": as_figure(copy_rate(among_training, seed=options.seed)),
        "correlation": COPY_CORRELATION,
        "training_pictures": len(training),
        "training_data": str(training.options.path),
    }


def agreement_figures(
    options: argparse.Namespace, judge: "Judge", sampled: "Tensor", captions: list[str], data: "CaptionedImages"
) -> dict[str, Any]:
    """How often the judge finds the caption that a picture was sampled for, with what it says of real pairs."""
    from unet_attn.judge import caption_agreement

    asked = [number for number, caption in enumerate(captions) if caption]
    known = known_captions(data)
    agreement = caption_agreement(
        judge, sampled[asked], [captions[number] for number in asked], known, seed=options.seed
    )
    return {
        "rate": as_figure(agreement),
        "pictures": len(asked),
        "judge": str(options.judge),
        "judge_record": judge.record,
    }


# ------------------------------------------------------------------------------------------------------- what comes out


def table(figures: dict[str, Any]) -> str:
    """The figures with their standard errors, a line each."""
    loss, copies = figures["loss"], figures["copies"]
    kind = {True: "loss on training data", False: "validation loss", None: "loss"}[loss["on_training_data"]]
    lines = [
        ("sampled against real", f"{figures['sampled_pictures']} against {figures['real_pictures']} pictures"),
        ("KID x 1000", f"{1000 * figures['kid']:.2f} +- {1000 * figures['kid_error']:.2f}"),
        ("Frechet distance", f"{figures['frechet']:.2f} +- {figures['frechet_error']:.2f}"),
        ("precision", f"{figures['precision']:.3f} +- {figures['precision_error']:.3f}"),
        ("recall", f"{figures['recall']:.3f} +- {figures['recall_error']:.3f}"),
        (kind, plus_minus(loss.get("true", loss["empty"]), digits=4)),
    ]
    if "gap_exchanged" in loss:
        lines.append(("gap, exchanged captions", plus_minus(loss["gap_exchanged"], digits=4)))
        lines.append(("gap, empty captions", plus_minus(loss["gap_empty"], digits=4)))
    if "rate" in copies:
        among = plus_minus(copies["rate_among_training"])
        lines.append(("near copies", f"{plus_minus(copies['rate'])} (among training pictures {among})"))
    else:
        lines.append(("near copies", f"not counted: {copies['skipped']}"))
    if "agreement" in figures:
        agreement, record = figures["agreement"], figures["agreement"]["judge_record"]
        ceiling = f"held-out real pairs {record['held_out_agreement']:.3f}"
        lines.append(("caption agreement", f"{plus_minus(agreement['rate'])} ({ceiling}, chance 0.010)"))
    return "\n".join(f"{name:24} {value}" for name, value in lines)


def plus_minus(figure: dict[str, float], *, digits: int = 3) -> str:
    return f"{figure['value']:.{digits}f} +- {figure['error']:.{digits}f}"


def loss_chart(gap: "ConditioningGap") -> str:
    from _chart import line_chart

    title = f"Loss by noise level, {gap.pictures} pictures"
    return line_chart(gap.by_time, gap.times, title=title, across="time (0 = clean, 1 = noise)", up="mean square error")


def settings_of(options: argparse.Namespace, pipeline: "TextToImagePipeline", extractor_name: str) -> dict[str, object]:
    """All that is needed to repeat the measurement."""
    import torch

    from unet_attn.measures import RESAMPLES

    return {
        "extractor": extractor_name,
        "data": str(options.data_path),
        "resolution": pipeline.unet.config.sample_size,
        "seed": options.seed,
        "seeds": [options.seed, options.seed + options.num_pictures - 1],
        "steps": options.steps,
        "guidance_scale": options.guidance_scale,
        "scheduler": type(pipeline.scheduler).__name__,
        "bootstrap_resamples": RESAMPLES,
        "torch": torch.__version__,
    }


def write_text(path: Path, content: str) -> None:
    """Complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
