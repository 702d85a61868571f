"""Measure this project on this machine, side by side with what it is compared to.

    python scripts/benchmark.py attention | import | train | sample [--help]

Ratios of runs in one process are what carries over to another machine; milliseconds are not.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from _measure import ProductRecorder, describe_machine, describe_pairs, resident_mib, seconds, timed_pairs
from PIL import Image
from torch import Tensor, nn

from unet_attn.attention import SelfAttention2d

if TYPE_CHECKING:  # both bring diffusers, which takes seconds that the other measurements need not wait
    from unet_attn.pipelines.text_to_image import TextToImagePipeline
    from unet_attn.training import Trainer

BATCH, CHANNELS, HEADS, DIM_HEAD, SIDE = 64, 128, 4, 32, 16
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
PASSES = ("forward", "forward+backward")
QUICKSTART = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"
WARM_UP_STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None, help="threads of torch (default: torch's own choice)")
    commands = parser.add_subparsers(dest="command", required=True)

    attention = commands.add_parser("attention", help="SelfAttention2d against diffusers' AttnProcessor2_0")
    attention.add_argument("--pairs", type=int, default=30, help="timed pairs per row (default 30)")
    attention.add_argument("--quick", action="store_true", help="a tiny size, to see that it runs")
    attention.add_argument("--peak-of", nargs=3, metavar=("MODULE", "LAYOUT", "PASS"), help=argparse.SUPPRESS)
    attention.set_defaults(run=benchmark_attention)

    imports = commands.add_parser("import", help="`import unet_attn.attention` over `import torch`")
    imports.add_argument("--pairs", type=int, default=7, help="timed pairs (default 7)")
    imports.set_defaults(run=benchmark_import)

    train = commands.add_parser("train", help="training steps of a configuration's network, on made-up pictures")
    train.add_argument("--config", type=Path, default=QUICKSTART)
    train.add_argument("--batch_size", type=int, default=64)
    train.add_argument("--steps", type=int, default=20, help="timed steps, after 3 of warm-up (default 20)")
    train.set_defaults(run=benchmark_train)

    sample = commands.add_parser("sample", help="guided pictures per second")
    sample.add_argument("pipeline", type=Path, nargs="?", metavar="RUN", help="default: --config with random weights")
    sample.add_argument("--config", type=Path, default=QUICKSTART)
    sample.add_argument("--batch_size", type=int, default=16)
    sample.add_argument("--steps", type=int, default=25, help="sampling steps (default 25)")
    sample.add_argument("--guidance_scale", type=float, default=3.0)
    sample.add_argument("--repeats", type=int, default=5)
    sample.set_defaults(run=benchmark_sample)

    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        options.run(options)
    except (argparse.ArgumentError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


# ----------------------------------------------------------------------------------------------------------- attention


def attention_module(name: str) -> nn.Module:
    """The same work in both: 128 channels, 4 heads x 32, q, k, v without bias, output with; no norm, no residual."""
    torch.manual_seed(0)
    if name == "ours":
        return SelfAttention2d(CHANNELS, heads=HEADS, dim_head=DIM_HEAD)
    from diffusers.models.attention_processor import Attention, AttnProcessor2_0  # seconds to import

    return Attention(CHANNELS, heads=HEADS, dim_head=DIM_HEAD, bias=False, processor=AttnProcessor2_0())


def attention_pass(module: nn.Module, name: str, x: Tensor) -> Callable[[], object]:
    """One call to time. The gradient that comes back has the input's layout, as from the network's next layer."""
    if name == "forward":
        return torch.inference_mode()(lambda: module(x))
    x = x.detach().requires_grad_()
    gradient = torch.randn_like(x)

    def forward_and_backward() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x).backward(gradient)

    return forward_and_backward


def attention_input(batch: int, side: int, layout: str) -> Tensor:
    x = torch.randn(batch, CHANNELS, side, side, generator=torch.Generator().manual_seed(0))
    return x.contiguous(memory_format=LAYOUTS[layout])


def check_same_work(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    """Copy our weights into the peer and compare outputs; raises AssertionError if the two do not compute the same."""
    for target, weight in zip((theirs.to_q, theirs.to_k, theirs.to_v), ours.to_qkv.weight.chunk(3), strict=True):
        target.weight.data.copy_(weight.flatten(1))
    theirs.to_out[0].weight.data.copy_(ours.to_out.weight.flatten(1))
    theirs.to_out[0].bias.data.copy_(ours.to_out.bias)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-4)


def peak_of_pass(module_name: str, layout: str, pass_name: str) -> float:
    """MiB that one pass needs above what stood before it, from the kernel's high-water mark of this process.

    Only a process that has not run the pass before tells: an allocator keeps what it once had. A batch of 1 first loads
    the kernels. Unlike the profiler's sums this also sees the scratch memory that oneDNN and BLAS take for themselves.
    """
    module, x = attention_module(module_name), attention_input(BATCH, SIDE, layout)
    attention_pass(module, pass_name, x[:1].contiguous(memory_format=LAYOUTS[layout]))()
    module.zero_grad(set_to_none=True)
    run = attention_pass(module, pass_name, x)
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
    run()
    return resident_mib("VmHWM") - before


def peaks_of_pass(layout: str, pass_name: str) -> list[float]:
    """Peak MiB of ours and of the peer, the median of three new processes each."""

    def measure(module_name: str) -> float:
        threads = str(torch.get_num_threads())
        case = ("--threads", threads, "attention", "--peak-of", module_name, layout, pass_name)
        done = subprocess.run([sys.executable, __file__, *case], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"the process that measures peak memory failed: {done.stderr.strip()}")
        return float(done.stdout)

    return [statistics.median(measure(name) for _ in range(3)) for name in ("ours", "peer")]


def benchmark_attention(options: argparse.Namespace) -> None:
    if options.peak_of:
        print(peak_of_pass(*options.peak_of))
        return
    batch, side, pairs = (2, 4, 2) if options.quick else (BATCH, SIDE, options.pairs)
    ours, theirs = attention_module("ours"), attention_module("peer")
    check_same_work(ours, theirs, attention_input(batch, side, "contiguous"))

    print(describe_machine())
    print(f"ours: SelfAttention2d, peer: diffusers' Attention with AttnProcessor2_0; B {batch}, C {CHANNELS},")
    print(f"{HEADS} heads x {DIM_HEAD}, {side} x {side}; median ms of {pairs} pairs; their ratio, 10 to 90 % of it")
    print(f"{'layout':14}{'pass':18}{'ours ms':>9}{'peer ms':>9}{'ratio':>21}{'ours MiB':>10}{'peer MiB':>10}")
    for layout in LAYOUTS:
        for pass_name in PASSES:
            x = attention_input(batch, side, layout)
            times = timed_pairs(attention_pass(ours, pass_name, x), attention_pass(theirs, pass_name, x), pairs)
            peaks = ["-", "-"] if options.quick else [f"{peak:.0f}" for peak in peaks_of_pass(layout, pass_name)]
            print(f"{layout:14}{pass_name:18}{describe_pairs(times)}{peaks[0]:>10}{peaks[1]:>10}")


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
    sections = {"data.path": data, "train.output_dir": run, **{f"train.{key}": value for key, value in train.items()}}
    return ["--config", str(config), *(part for key, value in sections.items() for part in (f"--{key}", str(value)))]


def trainer_for(arguments: list[str]) -> "Trainer":
    """scripts/train.py's own trainer, so that a step is what it is in training: data, noise, optimizer, EMA, logs."""
    from train import Trainer, TrainOptions, build, make_accelerator, make_parser

    config = make_parser().parse_args(arguments)
    options = TrainOptions(**config.train.as_dict())
    model, objective, data = build(config, options, None)
    return Trainer(model, objective, data, options, make_accelerator(options.output_dir), config="")


def benchmark_train(options: argparse.Namespace) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        data = made_up_pictures(folder / "data", max(256, options.batch_size))
        fixed = {
            "batch_size": options.batch_size,
            "gradient_accumulation_steps": 1,
            "max_minutes": "null",
            "sample_every": "null",
            "resume": "null",
        }
        steps = WARM_UP_STEPS + options.steps
        trainer_for(arguments_for(options.config, data, folder / "timed", max_steps=steps, **fixed)).run()
        peak = resident_mib("VmHWM")
        lines = (folder / "timed" / "logs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        speed = statistics.median(json.loads(line)["pictures_per_second"] for line in lines[WARM_UP_STEPS:])

        trainer = trainer_for(arguments_for(options.config, data, folder / "recorded", max_steps=1, **fixed))
        with ProductRecorder() as recorder:
            trainer.run()

    step, alone, giga = options.batch_size / speed, recorder.seconds_alone(), recorder.flop / 1e9
    print(describe_machine())
    print(f"training {options.config.name}, batch {options.batch_size}, median of {options.steps} steps")
    print(f"  {speed:.1f} pictures/s, {1000 * step:.0f} ms a step; peak memory of the process {peak:.0f} MiB")
    print(f"  {giga:.1f} GFLOP a step in convolutions and matrix products: {giga / step:.1f} GFLOP/s in training")
    print(f"  the same products each alone, warm: {1000 * alone:.0f} ms, {giga / alone:.1f} GFLOP/s")
    print(f"  share of that rate reached in training: {100 * alone / step:.0f} %")


def random_pipeline(options: argparse.Namespace) -> "TextToImagePipeline":
    with TemporaryDirectory() as name:
        data = made_up_pictures(Path(name) / "data", 256)
        return trainer_for(arguments_for(options.config, data, Path(name) / "run"))._pipeline()


def benchmark_sample(options: argparse.Namespace) -> None:
    from unet_attn.pipelines.text_to_image import TextToImagePipeline

    pipeline = TextToImagePipeline.from_pretrained(options.pipeline) if options.pipeline else random_pipeline(options)
    pipeline.set_progress_bar_config(disable=True)
    prompt = None if pipeline.text_encoder is None else "cloud upload"

    def sample() -> None:
        pipeline(
            prompt,
            num_images_per_prompt=options.batch_size,
            num_inference_steps=options.steps,
            guidance_scale=options.guidance_scale,
            generator=torch.Generator().manual_seed(0),
        )

    sample()
    times = [seconds(sample) for _ in range(options.repeats)]
    print(describe_machine())
    size = pipeline.unet.config.sample_size
    print(f"{options.steps} steps, guidance {options.guidance_scale}, {options.batch_size} at a time, {size} x {size}")
    print(f"  {options.batch_size / statistics.median(times):.1f} pictures/s (median of {options.repeats})")


if __name__ == "__main__":
    sys.exit(main())
