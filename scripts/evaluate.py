"""How good a run's pictures are, and whether it uses its captions. What each figure can tell: docs/evaluation.md.

    python scripts/evaluate.py RUN --data.path DIR [--judge JUDGE]
    accelerate launch --multi_gpu --num_processes 2 scripts/evaluate.py RUN --data.path DIR    # shares the sampling

Samples one picture for each of --num_pictures captions of DIR and compares them with up to 5,000 pictures of DIR. The
figures go to RUN/evaluation.json with all that is needed to repeat them, a plot of the loss to RUN/evaluation.svg,
the pictures most like a training picture to RUN/evaluation_nearest.png; compare only runs measured the same way. A
judge (scripts/train_judge.py) adds the agreement with the captions.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _evaluation_plan import (
    Outputs,
    Plan,
    check_sampling,
    chosen_outputs,
    held_out_share,
    known_captions,
    prepared,
    some_in_colour,
)
from sample import Parser, chosen_device, chosen_guidance

from unet_attn.processes import Processes

if TYPE_CHECKING:  # they take seconds to import, which a wrong command line need not wait for
    from collections.abc import Iterable, Iterator, Sequence

    from PIL import Image
    from torch import Tensor

    from unet_attn.measures import Nearest
    from unet_attn.pipelines.text_to_image import TextToImagePipeline

MOST_FOR_LOSS = 256  # pictures; each takes 15 passes through the network, and the differences are paired
MOST_NEAREST = 16  # pictures on the sheet


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or any saved pipeline")
    parser.add_argument("--data.path", dest="data_path", type=Path, required=True, metavar="DIR", help="real pictures")
    parser.add_argument("--judge", type=Path, metavar="JUDGE", help="a judge of this data, for the caption agreement")
    parser.add_argument(
        "--features",
        choices=("efficientnet", "judge", "inception"),
        default="efficientnet",
        help="the network in whose features distances are measured (default efficientnet)",
    )
    parser.add_argument("--inception_weights", type=Path, metavar="FILE", help="default: where torch.hub keeps it")
    parser.add_argument("--num_pictures", type=int, default=512, help="pictures to sample (default 512)")
    parser.add_argument("--seed", type=int, default=0, help="picture n starts from seed + n (default 0)")
    parser.add_argument("--steps", type=int, help="sampling steps (default: the pipeline's own)")
    parser.add_argument("--guidance_scale", type=float, help="default: the pipeline's own")
    parser.add_argument("--batch_size", type=int, default=64, help="pictures at a time (default 64); changes no result")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go (default RUN/evaluation.json)")
    options = parser.parse_args()
    try:
        evaluate(options)
    except ModuleNotFoundError as error:
        return refused(f"{error.name} is not installed: pip install 'unet-attn[train,eval]'")
    except (ValueError, OSError) as error:
        return refused(" ".join(str(error).split()))
    return 0


def refused(message: str) -> int:
    """Say what is wrong, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr)
    return 2


def evaluate(options: argparse.Namespace) -> None:
    outputs = check_options(options)
    processes = Processes("evaluate.py")
    if processes.device is not None and options.device is not None:
        raise ValueError("--device is for one process: the launch gives each of several its own")
    from unet_attn.pipelines.text_to_image import TextToImagePipeline

    # everything that can be refused is refused before minutes of sampling
    device = processes.device or processes.each(lambda: chosen_device(options.device))
    pipeline = processes.each(lambda: TextToImagePipeline.from_pretrained(options.run).to(device))
    options.guidance_scale = chosen_guidance(options.guidance_scale, pipeline)
    plan = processes.each(lambda: prepared(options, pipeline, device) if processes.is_main else None)
    captions, options.steps = processes.of_main(lambda: (plan.captions, plan.steps))

    seconds: dict[str, float] = {}
    with timed(seconds, "sampling"):
        shares = processes.of_all(lambda: sampled_share(options, pipeline, captions, processes))
    launched = processes.count
    processes.part()
    if not processes.is_main:
        return
    import torch
    from _evaluation_report import table

    from unet_attn.images import scaled

    sampled = torch.stack([scaled(pixels) for share in shares for pixels in share])
    figures, chart, sheet = measured(options, pipeline, plan, sampled, seconds)
    report = figures | settings_of(options, pipeline, plan, processes=launched) | {"seconds": seconds}
    print(table(report))
    print(f"measuring took {100 * (1 - seconds['sampling'] / sum(seconds.values())):.0f} % of the time")
    write_all(outputs, report, chart, sheet)
    if options.json is None and (options.run / "config.yaml").is_file():
        renew_report(options.run)


def check_options(options: argparse.Namespace) -> Outputs:
    """Refuse what is wrong whatever the run and the data are; where the figures go."""
    check_sampling(options)
    if options.features == "judge" and options.judge is None:
        raise ValueError("--features judge needs --judge, a judge of this data: train one with scripts/train_judge.py")
    if options.inception_weights is not None and options.features != "inception":
        raise ValueError("--inception_weights are for --features inception")
    return chosen_outputs(options)


# ----------------------------------------------------------------------------------------------------- what is measured


@contextmanager
def timed(seconds: dict[str, float], name: str) -> "Iterator[None]":
    started = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - started, 2)


def sampled_share(
    options: argparse.Namespace, pipeline: "TextToImagePipeline", captions: list[str], processes: Processes
) -> list[Any]:
    """The pictures that this process samples, whole batches of the one process that there might be: uint8 (C, H, W)."""
    from tqdm import tqdm

    from unet_attn.evaluation import sample_pictures
    from unet_attn.extractors import to_bytes

    # where there are fewer batches than processes, some would have nothing to do
    size = min(options.batch_size, -(-len(captions) // processes.count))
    batches = -(-len(captions) // size)
    first, last = (size * (batches * rank // processes.count) for rank in (processes.rank, processes.rank + 1))
    pipeline.set_progress_bar_config(disable=True)
    pictures = sample_pictures(
        pipeline,
        captions[first:last],
        seed=options.seed + first,
        num_inference_steps=options.steps,
        guidance_scale=options.guidance_scale,
        batch_size=size,
    )
    hidden = not (processes.is_main and sys.stderr.isatty())
    total = len(captions[first:last])
    return [to_bytes(each).numpy() for each in tqdm(pictures, total=total, desc="sampling", disable=hidden)]


def measured(
    options: argparse.Namespace,
    pipeline: "TextToImagePipeline",
    plan: Plan,
    sampled: "Tensor",
    seconds: dict[str, float],
) -> "tuple[dict[str, Any], str, Image.Image | None]":
    """All figures of the sampled pictures (N, C, H, W), with the chart of the loss and the sheet of copies."""
    import torch
    from _evaluation_report import loss_chart

    from unet_attn.conditioning import conditioning_gap
    from unet_attn.evaluation import compare_features
    from unet_attn.extractors import extract_features
    from unet_attn.feature_cache import cached_features

    data = plan.data
    with timed(seconds, "loss"):
        items = [data[index] for index in data.validation_indices(MOST_FOR_LOSS)]
        pictures, texts = torch.stack([item["image"] for item in items]), [item["caption"] for item in items]
        gap = conditioning_gap(pipeline, pictures, texts, seed=options.seed, batch_size=options.batch_size)
    with timed(seconds, "features"):
        real_features = cached_features((data[index]["image"] for index in plan.reference), plan.extractor)
        sampled_features = extract_features(sampled, plan.extractor.network)
    with timed(seconds, "measures"):
        figures: dict[str, Any] = asdict(compare_features(real_features, sampled_features, made_for=plan.made_for))
        own, met = [picture_digest(picture) for picture in pictures], set()
        figures["copies"], figures["nearest"], sheet = copies(options, plan, sampled, met)
        trained_on = None if plan.training is None else sum(digest in met for digest in own)
        on_training_data = {len(own): True, 0: False}.get(trained_on)
        figures["loss"] = gap_figures(gap) | {"trained_on": trained_on, "on_training_data": on_training_data}
        if plan.judge is not None and plan.made_for is not None:
            figures["agreement"] = agreement_figures(options, plan, sampled)
    return figures, loss_chart(gap), sheet


def gap_figures(gap: object) -> dict[str, Any]:
    """The gap as the result file has it: an estimate as {value, error}, without those that a model cannot have."""
    return {name: as_figure(value) for name, value in vars(gap).items() if value is not None}


def as_figure(value: object) -> object:
    return value._asdict() if hasattr(value, "_asdict") else value


def picture_digest(picture: "Tensor") -> bytes:
    """What tells a picture's pixels from others."""
    return hashlib.blake2b(picture.contiguous().numpy(), digest_size=16).digest()


def noted(pictures: "Iterable[Tensor]", met: set[bytes]) -> "Iterator[Tensor]":
    """The pictures, with their digests put into `met`."""
    for picture in pictures:
        met.add(picture_digest(picture))
        yield picture


def copies(
    options: argparse.Namespace, plan: Plan, sampled: "Tensor", met: set[bytes]
) -> "tuple[dict[str, Any], list[dict[str, Any]], Image.Image | None]":
    """Near copies of training pictures, and as a yardstick how many of those are near copies of one another.

    Also the sampled pictures that are most like a training picture, and a sheet of them beside those. met: takes the
    digests of the training pictures, which may have to be read from the disk.
    """
    if plan.training is None:
        return {"skipped": "the run's training pictures are not here"}, [], None
    import torch
    from _evaluation_report import nearest_sheet

    from unet_attn.evaluation import choose_pictures
    from unet_attn.measures import COPY_CORRELATION, Nearest, copy_rate, difference, nearest_pictures

    training = plan.training
    trained = [index for index, out in enumerate(training.held_out) if not out]
    own = torch.tensor(choose_pictures(len(trained), min(len(sampled), len(trained)), options.seed))
    yardstick = torch.stack([training[trained[place]]["image"] for place in own])
    found = nearest_pictures(  # one search for both, since it reads all training pictures
        torch.cat([sampled, yardstick]),
        noted((training[index]["image"] for index in trained), met),
        own=torch.cat([torch.full((len(sampled),), -1), own]),
    )
    nearest, among = (
        Nearest(*parts) for parts in zip(*(x.split([len(sampled), len(own)]) for x in found), strict=True)
    )
    rate, rate_among = copy_rate(nearest), copy_rate(among)
    figures = {
        "rate": as_figure(rate),
        "rate_among_training": as_figure(rate_among),
        "excess": as_figure(difference(rate, rate_among)),
        "correlation": COPY_CORRELATION,
        "training_pictures": len(trained),
        "training_data": str(training.options.path),
    }
    order = nearest.correlation.argsort(descending=True, stable=True)[:MOST_NEAREST].tolist()
    places = [trained[nearest.index[n]] for n in order]
    listed = nearest_figures(options, plan, nearest, order, [training.name(place) for place in places])
    return figures, listed, nearest_sheet(sampled[order], [training[place]["image"] for place in places], listed)


def nearest_figures(
    options: argparse.Namespace, plan: Plan, nearest: "Nearest", order: "Sequence[int]", names: "Sequence[str]"
) -> list[dict[str, Any]]:
    return [
        {
            "caption": plan.captions[n],
            "seed": options.seed + n,
            "correlation": round(nearest.correlation[n].item(), 4),
            "training_picture": name,
        }
        for n, name in zip(order, names, strict=True)
    ]


def agreement_figures(options: argparse.Namespace, plan: Plan, sampled: "Tensor") -> dict[str, Any]:
    """How often the judge finds the caption that a picture was sampled for.

    With that of the real pictures of the same captions among the same others, and of a judge that does not look.
    """
    import torch

    from unet_attn.judge import caption_agreement, caption_key
    from unet_attn.measures import blind_share

    known = known_captions(plan.data)
    real = torch.stack([plan.data[index]["image"] for index in plan.chosen])
    rate, ceiling = (
        caption_agreement(plan.judge, pictures, plan.captions, known, seed=options.seed) for pictures in (sampled, real)
    )
    times = Counter(map(caption_key, known))
    numbers = {key: number for number, key in enumerate(times)}
    return {
        "rate": as_figure(rate),
        "real": as_figure(ceiling),
        "chance": blind_share(list(times.values()), [numbers[caption_key(caption)] for caption in plan.captions]),
        "held_out": held_out_share(plan.judge, plan.data),
        "pictures": len(sampled),
        "judge": str(options.judge),
        "judge_record": plan.judge.record,
    }


# ------------------------------------------------------------------------------------------------------- what comes out


def settings_of(
    options: argparse.Namespace, pipeline: "TextToImagePipeline", plan: Plan, *, processes: int
) -> dict[str, object]:
    """All that is needed to repeat the measurement."""
    import torch

    from unet_attn.extractors import weights_digest
    from unet_attn.measures import RESAMPLES

    return {
        "extractor": plan.extractor.name,
        "extractor_weights": weights_digest(plan.extractor.network),
        "data": str(options.data_path),
        "pictures": len(plan.data),
        "skipped": len(plan.data.faults),
        "without_caption": None if plan.made_for is None else sum(not variants for variants in plan.data.captions),
        "colour_as_grey": some_in_colour(plan.data, plan.reference),
        "resolution": pipeline.unet.config.sample_size,
        "seed": options.seed,
        "seeds": [options.seed, options.seed + options.num_pictures - 1],
        "steps": options.steps,
        "guidance_scale": options.guidance_scale,
        "scheduler": type(pipeline.scheduler).__name__,
        "bootstrap_resamples": RESAMPLES,
        "processes": processes,
        "torch": torch.__version__,
    }


def write_all(outputs: Outputs, report: dict[str, Any], chart: str, sheet: "Image.Image | None") -> None:
    """Write the figures, and beside them the pictures; each complete or not at all."""
    from unet_attn.checkpoint import write_whole

    files = [outputs.chart] + ([] if sheet is None else [outputs.sheet])
    report = report | {"files": [path.name for path in files]}
    write_whole(outputs.figures, json.dumps(report, indent=2, allow_nan=False) + "\n")
    write_whole(outputs.chart, chart)
    if sheet is None:
        outputs.sheet.unlink(missing_ok=True)  # an earlier evaluation's, as chosen_outputs made sure
    else:
        content = BytesIO()
        sheet.save(content, "PNG")
        write_whole(outputs.sheet, content.getvalue())
    print(f"written to {', '.join([str(outputs.figures), *(path.name for path in files)])}")


def renew_report(run: Path) -> None:
    """The run's report and model card with the new figures. Those are written by then, whatever comes of this."""
    from report import renew

    try:
        print(*renew(run), sep="\n")
    except (ValueError, OSError) as error:
        print(f"warning: the report was not written: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
