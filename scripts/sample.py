"""Sample pictures from a trained run.

    python scripts/sample.py RUN --prompt "a heart" "cloud upload" --num_images 4 --seed 7 --out pictures

Picture n of the call (prompts in order, --num_images of each) has the seed --seed + n, which stands in its file name
and, with prompt, steps, scheduler, guidance and size, in its PNG metadata: each can be made again alone, by

    python scripts/sample.py RUN --like pictures/00007-a-heart.png --out again

A picture never takes the place of another: where one of the same name was made otherwise, the new one's name ends in
-2. Only grid.png, which shows the pictures of one call side by side, is of the last call.

With --best_of K --judge JUDGE, K candidates with seeds in a row are made for each picture, and the one that the judge
(scripts/train_judge.py) finds to fit the prompt best is written.
"""

import argparse
import os
import re
import sys
from itertools import count
from pathlib import Path
from typing import NamedTuple, NoReturn

from _folder import check_folder

WIDEST_GRID = 8  # pictures in a row
ROUNDING = 4  # of 255: what the same picture may differ by, made in another batch or on another machine
GRID_KEY = "pictures"  # marks a grid in its metadata, and names its pictures
# what a PNG says, by the names of the options; prompts are missing where the model has no text
LIKE = {
    "prompt": str,
    "negative_prompt": str,
    "seed": int,
    "steps": int,
    "scheduler": str,
    "guidance_scale": float,
    "height": int,
    "width": int,
    "dtype": str,
}


class Request(NamedTuple):
    """One picture to make."""

    seed: int
    prompt: str | None
    negative_prompt: str | None


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder, or any saved pipeline")
    parser.add_argument("--prompt", nargs="+", help="one or several captions; none for a model without text")
    parser.add_argument("--negative_prompt", nargs="+", help="what to lead away from: one for all prompts, or one each")
    parser.add_argument("--num_images", type=int, help="pictures per prompt (1)")
    parser.add_argument("--steps", "--num_inference_steps", type=int, help="inference steps (the pipeline's own)")
    parser.add_argument("--guidance_scale", type=float, help="1 follows, more insists (the pipeline's own)")
    parser.add_argument("--seed", type=int, help="seed of the first picture (0)")
    parser.add_argument("--scheduler", metavar="NAME", help="a diffusers class (the run's own)")
    parser.add_argument("--height", type=int, help="in pixels (as trained)")
    parser.add_argument("--width", type=int, help="in pixels (as trained)")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16 (float32)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (cuda where there is one)")
    parser.add_argument("--batch_size", type=int, default=16, help="pictures at a time (16)")
    parser.add_argument("--best_of", metavar="K", type=int, help="candidates for each picture (1)")
    parser.add_argument("--judge", metavar="JUDGE", type=Path, help="who chooses among the candidates")
    parser.add_argument("--like", metavar="FILE", type=Path, help="make a picture again, from what its PNG says of it")
    parser.add_argument("--attention", action="store_true", help="also write which word drew which pixel")
    parser.add_argument("--out", type=Path, default=Path("samples"), help="folder for the pictures (samples)")
    return parser.parse_args(arguments)


def settled(options: argparse.Namespace) -> argparse.Namespace:
    """The options with --like's settings or the defaults in the place of those that were not given."""
    defaults = {"num_images": 1, "best_of": 1, "seed": 0, "dtype": "float32"}
    if options.like is not None:
        given = [name for name in ("num_images", "best_of", "judge", *LIKE) if getattr(options, name) is not None]
        if given:
            raise ValueError(f"--like says all of the picture: leave out {', '.join(f'--{name}' for name in given)}")
        defaults |= settings_of(options.like)
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def settings_of(path: Path) -> dict[str, object]:
    """What a PNG that this script wrote says of how it was made, as this script's options."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            about = {name: image.info[name] for name in LIKE if name in image.info}
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not a picture") from error
    missing = [name for name in LIKE if name not in about and "prompt" not in name]
    if missing:
        raise ValueError(f"{path} does not say how it was made (no {', '.join(missing)}): was it written by sample.py?")
    try:
        return {name: [value] if "prompt" in name else LIKE[name](value) for name, value in about.items()}
    except ValueError as error:
        raise ValueError(f"{path} says what cannot be read: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        sample(settled(options))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "memory" not in str(error) and "allocate" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        print(f"error: not enough memory: lower --height and --width or --batch_size ({reason})", file=sys.stderr)
        return 2
    return 0


def sample(options: argparse.Namespace) -> None:
    """Load, sample in batches, write."""
    if not options.run.is_dir():
        raise FileNotFoundError(f"{options.run} is no folder")
    requests = picture_requests(options)
    check_folder(options.out, "--out")
    # imported here, so that --help and a wrong command line answer at once: diffusers takes seconds
    import torch

    from unet_attn.pipelines.grid import attention_sheet, picture_grid
    from unet_attn.pipelines.text_to_image import TextToImagePipeline

    device = chosen_device(options.device)
    judge = None if options.judge is None else loaded_judge(options.judge, device)
    pipeline = TextToImagePipeline.from_pretrained(options.run, dtype=options.dtype).to(device)
    if options.scheduler is not None:
        pipeline.scheduler = chosen_scheduler(options.scheduler, pipeline)
    steps, scale = chosen_steps(options.steps, pipeline), chosen_guidance(options.guidance_scale, pipeline)
    has_text = pipeline.text_encoder is not None
    settings = {
        "steps": steps,
        "scheduler": type(pipeline.scheduler).__name__,
        "guidance_scale": scale,
        "dtype": str(pipeline.unet.dtype).removeprefix("torch."),
    }

    images, captions, written = [], [], []
    # the candidates for one picture stay together
    batch_size = max(1, options.batch_size // options.best_of) * options.best_of
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        pipeline.set_progress_bar_config(desc=f"pictures {start + 1}-{start + len(batch)} of {len(requests)}")
        output = pipeline(
            [request.prompt for request in batch] if has_text and options.prompt else options.prompt,
            negative_prompt=[request.negative_prompt for request in batch] if options.negative_prompt else None,
            num_images_per_prompt=1 if has_text else len(batch),
            num_inference_steps=steps,
            guidance_scale=scale,
            height=options.height,
            width=options.width,
            # on the CPU whatever the device, so that a seed means the same noise everywhere
            generator=[torch.Generator().manual_seed(request.seed) for request in batch],
            return_attention=options.attention,
        )
        options.out.mkdir(parents=True, exist_ok=True)
        chosen = range(len(batch)) if judge is None else best_of_each(judge, output.images, batch, options.best_of)
        for number in chosen:
            request, image = batch[number], output.images[number]
            about = told_of(image, request, settings)
            written.append(write_picture(image, options.out / name_of(request), about))
            if options.attention:
                sheet = attention_sheet(image, *output.attention[number], request.prompt, WIDEST_GRID)
                path = written[-1].with_name(f"{written[-1].stem}-attention.png")
                write_picture(sheet, path, about | {"attention_of": written[-1].name})
            images.append(image)
            captions.append(request.prompt or f"seed {request.seed}")

    columns = options.num_images if 1 < options.num_images <= WIDEST_GRID else WIDEST_GRID
    renamed = [path.name for path in written if path.name not in {name_of(request) for request in requests}]
    if renamed:
        print(f"note: {len(renamed)} got other names, as other pictures had theirs: {renamed[0]}, ...", file=sys.stderr)
    grid = write_grid(picture_grid(images, captions, columns), options.out / "grid.png", written)
    print(f"wrote {len(images)} picture{'s' if len(images) > 1 else ''} and {grid.name} to {options.out}")


def picture_requests(options: argparse.Namespace) -> list[Request]:
    """Every picture asked for, with its seed. Raises ValueError for counts that do not fit."""
    for name in ("num_images", "batch_size", "best_of"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
    if (options.best_of > 1) != (options.judge is not None):
        raise ValueError("--best_of and --judge go together: how many candidates, and who chooses among them")
    if options.judge is not None and not options.prompt:
        raise ValueError("--best_of needs --prompt: the judge chooses the picture that fits it best")
    for name in ("prompt", "negative_prompt"):
        for text in getattr(options, name) or []:
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ValueError(f"--{name} {text!r} is not UTF-8 text")
    prompts = options.prompt or [None]
    negatives = options.negative_prompt or [None]
    if len(negatives) not in (1, len(prompts)):
        raise ValueError(f"got {len(negatives)} negative prompts for {len(prompts)} prompts: give one, or one each")
    negatives = negatives * (len(prompts) if len(negatives) == 1 else 1)
    each = options.num_images * options.best_of
    if not 0 <= options.seed < 2**63 - len(prompts) * each:
        raise ValueError(f"--seed must be a whole number from 0, got {options.seed}")
    pairs = [pair for pair in zip(prompts, negatives, strict=True) for _ in range(each)]
    return [Request(options.seed + number, *pair) for number, pair in enumerate(pairs)]


def loaded_judge(folder: Path, device: "torch.device") -> "Judge":  # noqa: F821
    from unet_attn.judge import Judge

    return Judge.load(folder).to(device)


def best_of_each(
    judge: "Judge",  # noqa: F821
    images: list["Image.Image"],  # noqa: F821
    requests: list[Request],
    count: int,
) -> list[int]:
    """Each `count` pictures in a row are candidates for one: the numbers of those that fit their prompts best."""
    import torch

    from unet_attn.data import to_tensor
    from unet_attn.judge import best_first

    pictures = torch.stack([to_tensor(image) for image in images])
    firsts = range(0, len(images), count)
    return [first + best_first(judge, pictures[first : first + count], requests[first].prompt)[0] for first in firsts]


def chosen_device(name: str | None) -> "torch.device":  # noqa: F821  torch is imported late
    """The device asked for, or the best there is."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # "meta" has no numbers to give back
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def chosen_scheduler(name: str, pipeline: "TextToImagePipeline") -> "SchedulerMixin":  # noqa: F821
    """A scheduler of another class, made from the run's own."""
    import diffusers

    from unet_attn.schedulers import sampling_schedulers, scheduler_from_config

    kind = pipeline.config.prediction_type
    good = sampling_schedulers(kind)
    if name not in good:
        fault = f"cannot sample a {kind} model" if hasattr(diffusers, name) else "is unknown"
        raise ValueError(f"--scheduler {name} {fault}; choose from {', '.join(good)}")
    try:
        return scheduler_from_config(getattr(diffusers, name), pipeline.scheduler.config)
    except ValueError as error:
        raise ValueError(f"--scheduler {error}") from error


def chosen_steps(asked: int | None, pipeline: "TextToImagePipeline") -> int:  # noqa: F821
    """The number of steps asked for; the pipeline's own gives way to the most that model and scheduler have."""
    if asked is not None:
        return asked
    from unet_attn.schedulers import most_steps

    own, trained = pipeline.config.default_steps, pipeline.scheduler.config.num_train_timesteps
    most = most_steps(pipeline.scheduler, min(own, trained))
    if most is None or most == own:
        return own  # of which there is a schedule, or the call says why there is none
    why = "the model was trained with no more"
    if most < trained:
        why = f"{type(pipeline.scheduler).__name__} has no schedule of {min(own, trained)}"
    print(f"note: {most} steps, as {why}", file=sys.stderr)
    return most


def chosen_guidance(asked: float | None, pipeline: "TextToImagePipeline") -> float:  # noqa: F821
    """The guidance scale asked for, or the pipeline's own."""
    return pipeline.config.default_guidance_scale if asked is None else asked


def name_of(request: Request) -> str:
    words = re.sub(r"\W+", "-", request.prompt or "").strip("-").lower()[:40]
    return f"{request.seed:05d}-{words}.png" if words else f"{request.seed:05d}.png"


def told_of(image: "Image.Image", request: Request, settings: dict[str, object]) -> dict[str, str]:  # noqa: F821
    """What a picture's metadata say of how it was made: all that --like needs."""
    prompts = {"prompt": request.prompt, "negative_prompt": request.negative_prompt}
    about = {
        "seed": request.seed,
        **{name: text for name, text in prompts.items() if text is not None},
        **settings,
        "height": image.height,
        "width": image.width,
    }
    return {name: str(value) for name, value in about.items()}


def write_picture(image: "Image.Image", path: Path, about: dict[str, str]) -> Path:  # noqa: F821
    """Write a PNG with these metadata and return its path, which ends in -2, -3, ... where other pictures lie."""
    for number in count(1):
        free = path if number == 1 else path.with_name(f"{path.stem}-{number}.png")
        if not os.path.lexists(free) or is_same(free, image, about):
            break
    save_whole(image, free, about)
    return free


def is_same(path: Path, image: "Image.Image", about: dict[str, str]) -> bool:  # noqa: F821
    """Whether a file holds this picture, made in this way; another run's would have the same metadata."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as there:
            if getattr(there, "text", None) != about or (there.mode, there.size) != (image.mode, image.size):
                return False
            return bool(np.abs(np.asarray(there).astype(int) - np.asarray(image)).max() <= ROUNDING)
    except (OSError, ValueError, SyntaxError):  # no picture, or a damaged one
        return False


def write_grid(grid: "Image.Image", path: Path, pictures: list[Path]) -> Path:  # noqa: F821
    """Write a grid of pictures in the place of the last one, but not in that of anything else. Returns its path."""
    from PIL import Image

    for number in count(1):
        free = path if number == 1 else path.with_name(f"{path.stem}-{number}.png")
        try:
            with Image.open(free) as there:
                if GRID_KEY in there.info:
                    break
        except FileNotFoundError:
            break
        except (OSError, SyntaxError):
            continue
    save_whole(grid, free, {GRID_KEY: "\n".join(picture.name for picture in pictures)})
    return free


def save_whole(image: "Image.Image", path: Path, about: dict[str, str]) -> None:  # noqa: F821
    """Write a PNG whole or not at all. Raises OSError, naming it, if the disk does not take it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        image.save(partial, format="PNG", pnginfo=png_info(about))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written ({error.strerror}): make room, or give another --out") from error


def png_info(about: dict[str, str]) -> "PngInfo":  # noqa: F821
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for name, text in about.items():
        info.add_text(name, text)
    return info


if __name__ == "__main__":
    sys.exit(main())
