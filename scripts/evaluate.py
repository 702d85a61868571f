"""How far a run's pictures are from real ones: KID and Frechet distance.

    python scripts/evaluate.py runs/NAME --data.path DIR

Samples one picture for each of --num_pictures captions of DIR and compares them with the pictures of those captions.
The figures go to RUN/evaluation.json with all that is needed to repeat them; compare only runs measured the same way.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they take seconds to import, which a wrong command line need not wait for
    from unet_attn.data import CaptionedImages
    from unet_attn.evaluation import Distances
    from unet_attn.pipelines.text_to_image import TextToImagePipeline

DATA_KEYS = ("caption_extension", "background", "on_error", "max_pixels")  # how the run's pictures were read


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or any saved pipeline")
    parser.add_argument("--data.path", dest="data_path", type=Path, required=True, metavar="DIR", help="real pictures")
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
    from sample import chosen_device
    from tqdm import tqdm

    from unet_attn.evaluation import (
        EfficientNetFeatures,
        check_counts,
        choose_pictures,
        compare_features,
        extract_features,
        sample_pictures,
    )
    from unet_attn.pipelines.text_to_image import TextToImagePipeline

    # everything that can be refused is refused before minutes of sampling
    device = chosen_device(options.device)
    pipeline = TextToImagePipeline.from_pretrained(options.run).to(device)
    extractor = EfficientNetFeatures().to(device)
    data = real_pictures(options, pipeline)
    chosen = choose_pictures(len(data), options.num_pictures, options.seed)
    check_counts(real=len(set(chosen)), sampled=len(chosen))

    real = extract_features((data[index]["image"] for index in sorted(set(chosen))), extractor)
    pipeline.set_progress_bar_config(disable=True)
    pictures = sample_pictures(
        pipeline,
        [data[index]["caption"] for index in chosen],
        seed=options.seed,
        num_inference_steps=options.steps,
        guidance_scale=options.guidance_scale,
        batch_size=options.batch_size,
    )
    progress = tqdm(pictures, total=len(chosen), desc="sampling", unit="picture", disable=not sys.stderr.isatty())
    sampled = extract_features(progress, extractor)

    distances = compare_features(real, sampled, seed=options.seed)
    print(table(distances))
    path = options.json or options.run / "evaluation.json"
    write_json(path, report(options, pipeline, distances))
    print(f"written to {path}")


def real_pictures(options: argparse.Namespace, pipeline: "TextToImagePipeline") -> "CaptionedImages":
    """The data set as the run would read it: same size, channels and background."""
    import yaml

    from unet_attn.data import CaptionedImages

    config = options.run / "config.yaml"
    section = yaml.safe_load(config.read_text(encoding="utf-8"))["data"] if config.exists() else {}
    return CaptionedImages(
        options.data_path,
        resolution=pipeline.unet.config.sample_size,
        channels=pipeline.unet.config.out_channels,
        caption_dropout=0.0,
        require_captions=pipeline.text_encoder is not None,
        **{key: section[key] for key in DATA_KEYS if key in section},
    )


def table(distances: "Distances") -> str:
    return "\n".join(
        [
            f"sampled against real   {distances.sampled_pictures} against {distances.real_pictures} pictures",
            f"KID x 1000             {1000 * distances.kid:.2f} +- {1000 * distances.kid_std:.2f} over subsets",
            f"Frechet distance       {distances.frechet:.2f}",
        ]
    )


def report(options: argparse.Namespace, pipeline: "TextToImagePipeline", distances: "Distances") -> dict[str, object]:
    """All that is needed to repeat the measurement."""
    import torch

    from unet_attn.evaluation import EXTRACTOR

    return {
        **asdict(distances),
        "extractor": EXTRACTOR,
        "data": str(options.data_path),
        "resolution": pipeline.unet.config.sample_size,
        "seed": options.seed,
        "seeds": [options.seed, options.seed + options.num_pictures - 1],
        "steps": options.steps,
        "guidance_scale": options.guidance_scale,
        "scheduler": type(pipeline.scheduler).__name__,
        "torch": torch.__version__,
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    """Complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
