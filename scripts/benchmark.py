"""Measure this project on this machine, side by side with what it is compared to.

    python scripts/benchmark.py attention | import | train | data | sample | quality [--help]

Ratios of runs in one process are what carries over to another machine; milliseconds are not.
"""

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import _data_wait
import _quality
import torch
from _attention import add_arguments
from _measure import ProductRecorder, describe_machine, resident_mib, seconds
from PIL import Image

if TYPE_CHECKING:  # both bring diffusers, which takes seconds that the other measurements need not wait
    from unet_attn.pipelines.text_to_image import TextToImagePipeline
    from unet_attn.training import Trainer

QUICKSTART = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None, help="threads of torch (default: torch's own choice)")
    commands = parser.add_subparsers(dest="command", required=True)

    add_arguments(commands.add_parser("attention", help="SelfAttention2d against other projects' attention"))

    imports = commands.add_parser("import", help="`import unet_attn.attention` over `import torch`")
    imports.add_argument("--pairs", type=int, default=7, help="timed pairs (default 7)")
    imports.set_defaults(run=benchmark_import)

    train = commands.add_parser("train", help="training steps of a configuration's network, on made-up pictures")
    train.add_argument("--config", type=Path, default=QUICKSTART)
    train.add_argument("--batch_size", type=int, default=64)
    train.add_argument("--steps", type=int, default=20, help="timed steps, after 3 of warm-up (default 20)")
    train.add_argument("--processes", action="store_true", help="also two processes of one thread against one of two")
    train.set_defaults(run=benchmark_train)

    data = commands.add_parser("data", help="what a training step waits for its pictures; checking them before")
    _data_wait.add_arguments(data, config=QUICKSTART)
    data.set_defaults(run=lambda options: _data_wait.benchmark_data(options, trainer_for, arguments_for))

    sample = commands.add_parser("sample", help="guided pictures per second")
    sample.add_argument("pipeline", type=Path, nargs="?", metavar="RUN", help="default: --config with random weights")
    sample.add_argument("--config", type=Path, default=QUICKSTART)
    sample.add_argument("--batch_size", type=int, default=16)
    sample.add_argument("--steps", type=int, help="sampling steps (default: the pipeline's own)")
    sample.add_argument("--guidance_scale", type=float, help="(default: the pipeline's own)")
    sample.add_argument("--repeats", type=int, default=5)
    sample.set_defaults(run=benchmark_sample)

    quality = commands.add_parser("quality", help="pictures after equal minutes of training, ours and other projects'")
    _quality.add_arguments(quality, config=QUICKSTART)

    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        options.run(options)
    except (argparse.ArgumentError, ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


# -------------------------------------------------------------------------------------------------------------- import


def benchmark_import(options: argparse.Namespace) -> None:
    """Both statements in new processes, in turns; what the interpreter needs to start is outside the clock."""

    def seconds_of(statement: str) -> float:
        code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    statements = ("import unet_attn.attention", "import torch")
    for statement in statements:
        seconds_of(statement)  # the files are read from disk once
    times = [tuple(seconds_of(statement) for statement in statements) for _ in range(options.pairs)]
    ours, torch_alone = (statistics.median(side) for side in zip(*times, strict=True))
    print(describe_machine())
    print(f"import unet_attn.attention {ours:.2f} s, import torch {torch_alone:.2f} s: {ours - torch_alone:+.2f} s")


# ----------------------------------------------------------------------------------------------------- train and sample


def made_up_pictures(folder: Path, count: int) -> Path:
    """Noise with captions of three words; what a picture shows does not change how long a step takes."""
    folder.mkdir()
    words = ["arrow", "battery", "calendar", "cloud", "file", "folder", "heart", "shield", "left", "off", "plus"]
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        pixels = torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
        caption = " ".join(words[i] for i in torch.randint(0, len(words), (3,), generator=generator))
        rows.append(json.dumps({"file_name": f"{number}.png", "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def arguments_for(config: Path, data: Path, run: Path, **train: object) -> list[str]:
    """scripts/train.py's command line: the configuration, with what belongs to the measurement in its place."""
    sections = {"data.path": data, "data.validation_share": 0, "train.output_dir": run}
    sections |= {f"train.{key}": value for key, value in train.items()}
    return ["--config", str(config), *(part for key, value in sections.items() for part in (f"--{key}", str(value)))]


def trainer_for(arguments: list[str]) -> "Trainer":
    """scripts/train.py's own trainer, so that a step is what it is in training: data, noise, optimizer, EMA, logs."""
    from train import Trainer, TrainOptions, build, make_accelerator, make_parser

    config = make_parser().parse_args(arguments)
    options = TrainOptions(**config.train.as_dict())
    built = build(config, options, None)
    accelerator = make_accelerator(options.output_dir)
    return Trainer(built.model, built.objective, built.data, options, accelerator, config="", tuning=built.tuning)


def benchmark_train(options: argparse.Namespace) -> None:
    from _training import WARM_UP_STEPS, overhead, pictures_per_second, two_against_one

    with TemporaryDirectory() as name:
        folder = Path(name)
        data = made_up_pictures(folder / "data", max(256, options.batch_size))
        fixed = {
            "batch_size": options.batch_size,
            "gradient_accumulation_steps": 1,
            "max_minutes": "null",
            "sample_every": "null",
            "validate_every": "null",
            "resume": "null",
        }
        steps = WARM_UP_STEPS + options.steps
        trainer_for(arguments_for(options.config, data, folder / "timed", max_steps=steps, **fixed)).run()
        peak, speed = resident_mib("VmHWM"), pictures_per_second(folder / "timed")

        trainer = trainer_for(arguments_for(options.config, data, folder / "parts", max_steps=steps, **fixed))
        beside, pause = overhead(trainer)
        trainer = trainer_for(arguments_for(options.config, data, folder / "recorded", max_steps=1, **fixed))
        with ProductRecorder() as recorder:
            trainer.run()
        two = one = None
        if options.processes:
            launched = partial(arguments_for, options.config, data, max_steps=steps, **fixed)
            two, one = two_against_one(launched, folder, rounds=2)

    step, alone, giga = options.batch_size / speed, recorder.seconds_alone(), recorder.flop / 1e9
    print(describe_machine())
    print(f"training {options.config.name}, batch {options.batch_size}, median of {options.steps} steps")
    print(f"  {speed:.1f} pictures/s, {1000 * step:.0f} ms a step; peak memory of the process {peak:.0f} MiB")
    print(f"  {giga:.1f} GFLOP a step in convolutions and matrix products: {giga / step:.1f} GFLOP/s in training")
    print(f"  the same products each alone, warm: {1000 * alone:.0f} ms, {giga / alone:.1f} GFLOP/s")
    print(f"  share of that rate reached in training: {100 * alone / step:.0f} %")
    print(f"  beside forward, backward and optimizer: {100 * beside:.1f} % of a step; a checkpoint: {pause:.2f} s")
    if two is not None:
        print(f"  two processes of one thread: {two:.0f} pictures/s, one of two: {one:.0f}, ratio {two / one:.2f}")


def random_pipeline(options: argparse.Namespace) -> "TextToImagePipeline":
    with TemporaryDirectory() as name:
        data = made_up_pictures(Path(name) / "data", 256)
        with trainer_for(arguments_for(options.config, data, Path(name) / "run")).watcher._pipeline() as pipeline:
            return pipeline


def benchmark_sample(options: argparse.Namespace) -> None:
    from sample import chosen_guidance, chosen_steps

    from unet_attn.pipelines.text_to_image import TextToImagePipeline

    pipeline = TextToImagePipeline.from_pretrained(options.pipeline) if options.pipeline else random_pipeline(options)
    pipeline.set_progress_bar_config(disable=True)
    steps, scale = chosen_steps(options.steps, pipeline), chosen_guidance(options.guidance_scale, pipeline)
    prompt = None if pipeline.text_encoder is None else "cloud upload"

    def sample(*, return_attention: bool = False) -> None:
        pipeline(
            prompt,
            num_images_per_prompt=options.batch_size,
            num_inference_steps=steps,
            guidance_scale=scale,
            generator=torch.Generator().manual_seed(0),
            return_attention=return_attention,
        )

    has_maps = prompt is not None and bool(pipeline.unet.config.attention_levels)
    with_maps = partial(sample, return_attention=has_maps)
    for warm_up in (sample, with_maps):
        warm_up()
    pairs = [(seconds(sample), seconds(with_maps)) for _ in range(options.repeats)]
    times, ratios = [plain for plain, _ in pairs], [maps / plain for plain, maps in pairs]
    print(describe_machine())
    size = pipeline.unet.config.sample_size
    print(f"{steps} steps, guidance {scale:g}, {options.batch_size} at a time, {size} x {size}")
    print(f"  {options.batch_size / statistics.median(times):.1f} pictures/s (median of {options.repeats})")
    if has_maps:
        print(f"  with attention maps {statistics.median(ratios):.2f} of the time")


if __name__ == "__main__":
    sys.exit(main())
