"""Which scheduler, how many steps, how much guidance: the scores of a run's pictures for each combination.

    python scripts/steps.py RUN --data.path DIR [--judge JUDGE] [--scheduler A B ...] [--steps 5 10 25 ...]

Prints a Markdown table with a row per combination, all from the same prompts and seeds and against the same pictures,
with KID and Frechet distance (lower is closer), the agreement with the captions, and how long a picture takes.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from _evaluation_plan import Plan, check_sampling, known_captions, prepared
from _measure import describe_machine
from sample import chosen_device, chosen_guidance, chosen_scheduler

from unet_attn.extractors import EXTRACTORS, extract_features
from unet_attn.feature_cache import cached_features
from unet_attn.judge import caption_agreement
from unet_attn.pipelines.guidance import Guidance
from unet_attn.pipelines.inputs import check_steps
from unet_attn.pipelines.text_to_image import TextToImagePipeline


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or any saved pipeline")
    parser.add_argument("--data.path", dest="data_path", type=Path, required=True, metavar="DIR", help="real pictures")
    parser.add_argument("--judge", type=Path, metavar="JUDGE", help="a judge of this data, for the agreement")
    parser.add_argument("--features", choices=EXTRACTORS, default="efficientnet", help="default efficientnet")
    parser.add_argument("--scheduler", nargs="+", metavar="NAME", help="diffusers classes (the run's own)")
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 10, 15, 25, 50], help="default 5 10 15 25 50")
    parser.add_argument("--guidance_scale", type=float, nargs="+", help="default: the pipeline's own")
    parser.add_argument("--interval", type=float, nargs=2, default=(0.0, math.inf), metavar=("LOW", "HIGH"),
                        help="noise levels between which there is guidance (all)")  # fmt: skip
    parser.add_argument("--guide", type=Path, metavar="RUN", help="a weaker run, whose U-Net guides instead of no text")
    parser.add_argument("--num_pictures", type=int, default=512, help="pictures of each row (default 512)")
    parser.add_argument("--batch_size", type=int, default=64, help="pictures at a time (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="picture n starts from seed + n (default 0)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.set_defaults(inception_weights=None)
    options = parser.parse_args()
    try:
        print(f"{describe_machine()}; {options.num_pictures} pictures a row")
        for row in table_rows(options):
            print(f"| {' | '.join(row)} |", flush=True)
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: pip install 'unet-attn[train,eval]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def table_rows(options: argparse.Namespace) -> Iterator[list[str]]:
    """The rows of the table, head first, each when it is measured."""
    from unet_attn.evaluation import sample_pictures  # whose packages only evaluating needs

    check_sampling(options)
    device = chosen_device(options.device)
    pipeline = TextToImagePipeline.from_pretrained(options.run)
    if options.guide is not None:
        weaker = TextToImagePipeline.from_pretrained(options.guide).unet
        pipeline = TextToImagePipeline.from_pipe(pipeline, guide_unet=weaker)
    pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    guidance = Guidance(interval=tuple(options.interval))
    own = pipeline.scheduler
    schedulers = [own] if options.scheduler is None else [chosen_scheduler(n, pipeline) for n in options.scheduler]
    for count in options.steps:
        check_steps(count, own.config.num_train_timesteps)
    scales = [chosen_guidance(scale, pipeline) for scale in options.guidance_scale or [None]]
    with_first_steps = argparse.Namespace(**{**vars(options), "steps": options.steps[0]})
    plan = prepared(with_first_steps, pipeline, device)
    real = cached_features((plan.data[index]["image"] for index in plan.reference), plan.extractor)

    yield ["scheduler", "steps", "guidance", "KID x 1000", "Frechet", "agreement", "ms a picture"]
    yield ["---"] * 7
    for scheduler, scale, count in itertools.product(schedulers, scales, options.steps):
        pipeline.scheduler = scheduler
        began = time.perf_counter()
        sampled = torch.stack(
            list(
                sample_pictures(
                    pipeline,
                    plan.captions,
                    seed=options.seed,
                    num_inference_steps=count,
                    guidance_scale=scale,
                    guidance=guidance,
                    batch_size=options.batch_size,
                )
            )
        )
        spent = (time.perf_counter() - began) / len(sampled)
        yield [type(scheduler).__name__, str(count), f"{scale:g}", *scores(plan, real, sampled, seed=options.seed),
               f"{1000 * spent:.0f}"]  # fmt: skip


def scores(plan: Plan, real: torch.Tensor, sampled: torch.Tensor, *, seed: int) -> list[str]:
    """KID, Frechet distance and agreement of sampled pictures (N, C, H, W), with their errors, as cells."""
    from unet_attn.evaluation import compare_features

    distances = compare_features(real, extract_features(sampled, plan.extractor.network), made_for=plan.made_for)
    agreement = "-"
    if plan.judge is not None and plan.made_for is not None:
        found = caption_agreement(plan.judge, sampled, plan.captions, known_captions(plan.data), seed=seed)
        agreement = f"{found.value:.3f} ± {found.error:.3f}"
    return [
        f"{1000 * distances.kid:.1f} ± {1000 * distances.kid_error:.1f}",
        f"{distances.frechet:.2f} ± {distances.frechet_error:.2f}",
        agreement,
    ]


if __name__ == "__main__":
    sys.exit(main())
