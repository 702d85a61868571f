"""Pictures that a caller gives to a pipeline, as the network sees them, and how they are noised."""

import os
from io import BytesIO
from numbers import Real
from pathlib import Path

import numpy as np
import torch
from diffusers import SchedulerMixin
from einops import rearrange
from PIL import Image
from torch import Tensor

from unet_attn.faults import one_line, shown
from unet_attn.images import FORMATS, load_image, to_tensor
from unet_attn.pipelines.inputs import check_count

Picture = str | Path | Image.Image | np.ndarray | Tensor
# PNG holds these; load_image then makes of them what it makes of a file, transparency and orientation included
PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
# the one of those that keeps the transparency of another
WITH_ALPHA = {"La": "LA", "PA": "RGBA", "RGBa": "RGBA"}

# These reckon their orders from the first of all steps, so that a start at a later one takes wrong coefficients.
FIRST_STEP_ONLY = ("LMSDiscreteScheduler", "PNDMScheduler")


def read_pictures(
    pictures: Picture | list[Picture], *, channels: int, size: tuple[int | None, int | None], name: str = "image"
) -> Tensor:
    """Pictures of any kind as (B, C, H, W) float32 in [-1, 1].

    pictures: one or a list of files, PIL pictures, arrays (H, W[, C]) of uint8, or of floats in [0, 1] or bools, or
    tensors ([C,] H, W) of floats in [0, 1] or bools; or one array (B, H, W, C) or tensor (B, C, H, W). size: the
    height and width to scale files and PIL pictures to; None leaves a side as it is. name: of the argument, for errors.
    Raises ValueError if they are of no such kind, or not all of one size, or hold values out of their range, or none
    that is known, as 32-bit pixels do; and for a size that is no whole number of at least 1.
    """
    for side, wanted in zip(("height", "width"), size, strict=True):
        if wanted is not None:
            check_count(side, wanted)
    if isinstance(pictures, np.ndarray | Tensor) and pictures.ndim == 4:
        pictures = list(pictures)
    if not isinstance(pictures, list):
        pictures = [pictures]
    if not pictures:
        raise ValueError(f"{name} must be a picture or a list of them, got an empty list")
    read = [_read(picture, channels, size, name) for picture in pictures]
    for picture in read:
        if picture.shape != read[0].shape:
            raise ValueError(
                f"every {name} of a call must have one size, got {_size(read[0])} and {_size(picture)}: "
                "give height and width, or scale them"
            )
        if picture.shape[0] != channels:
            raise ValueError(f"{name} must have {channels} channels, as the U-Net, got {picture.shape[0]}")
    return torch.stack(read)


def spread(pictures: Tensor, *, prompts: int, images: int, name: str = "image") -> Tensor:
    """One picture for all prompts, or one each, as a row for each picture to make. (1 or prompts, ...) to (B, ...)."""
    if pictures.shape[0] not in (1, prompts):
        raise ValueError(f"got {pictures.shape[0]} pictures as {name} for {prompts} prompts: give one, or one each")
    return pictures.expand(prompts, -1, -1, -1).repeat_interleave(images, dim=0)


def noised(scheduler: SchedulerMixin, pictures: Tensor, noise: Tensor, step: int) -> Tensor:
    """The pictures at the noise level at which the scheduler's timesteps[step] begins. (B, C, H, W), float32."""
    timestep = scheduler.timesteps[step : step + 1].expand(len(pictures))
    if scheduler.config.get("prediction_type") == "flow_prediction" or hasattr(scheduler, "scale_noise"):
        # a flow, by its own sigma: stock methods look it up by the timestep, which may have been rounded to another's
        sigma = scheduler.sigmas[step].to(pictures.device)
        return (1.0 - sigma) * pictures + sigma * noise
    return scheduler.add_noise(pictures, noise, timestep)


def first_step(scheduler: SchedulerMixin, strength: float, steps: int) -> int:
    """The place in scheduler.timesteps at which a picture changed by `strength` begins, and the scheduler set to it.

    strength: in (0, 1], the share of the steps that is done, at least one. Raises ValueError for another, and for a
    scheduler that must begin at its first step, or goes from pictures to noise.
    """
    if not hasattr(scheduler, "add_noise") and not hasattr(scheduler, "scale_noise"):
        raise ValueError(f"{type(scheduler).__name__} does not sample, it inverts: use another scheduler")
    if isinstance(strength, bool) or not isinstance(strength, Real) or not 0 < strength <= 1:
        raise ValueError(f"strength must lie above 0 and at most at 1, got {strength!r}")
    if steps == 1 and strength < 1:
        raise ValueError(f"strength {strength} cannot be had in one step, which forgets the image: take more steps")
    done = max(1, round(steps * strength))
    if done == steps:
        return 0
    name = next((each.__name__ for each in type(scheduler).__mro__ if each.__name__ in FIRST_STEP_ONLY), None)
    if name is not None:
        raise ValueError(f"{name} must begin at its first step: use another scheduler, or strength 1")
    first = (steps - done) * scheduler.order
    levels = getattr(scheduler, "sigmas", None)
    # a last step to its own level divides 0 by 0, unless there are others before it
    if scheduler.order == 1 and levels is not None and bool((levels[first:] == levels[first]).all()):
        raise ValueError(
            f"{type(scheduler).__name__} has at strength {strength} of {steps} steps one left that stays where it is: "
            "take a higher strength or more steps"
        )
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first)
    return first


def _read(picture: Picture, channels: int, size: tuple[int | None, int | None], name: str) -> Tensor:
    _check_axes(picture, channels, name)
    if isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.ndim in (2, 3):
        picture = Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 and picture.ndim == 3 else picture)
    if isinstance(picture, str | Path | Image.Image):
        return to_tensor(_resized(load_image(_as_file(picture, name), channels=channels), size))
    if isinstance(picture, np.ndarray) and picture.dtype.kind in "fb" and picture.ndim in (2, 3):
        picture = torch.from_numpy(np.ascontiguousarray(picture))
        picture = picture if picture.ndim == 2 else rearrange(picture, "h w c -> c h w")
    if isinstance(picture, Tensor):
        picture = picture[None] if picture.ndim == 2 else picture
        picture = picture.float() if picture.dtype == torch.bool else picture
    if not isinstance(picture, Tensor) or picture.ndim != 3 or not picture.is_floating_point():
        kind = f"{picture.dtype} of {picture.ndim} axes" if hasattr(picture, "dtype") else type(picture).__name__
        raise ValueError(
            f"{name} must be a file, a PIL picture, an array (H, W, C) or a float tensor (C, H, W), got {kind}"
        )
    picture = picture.detach().float()
    if not bool(((picture >= 0) & (picture <= 1)).all()):
        raise ValueError(f"{name} must hold values in [0, 1], got {float(picture.min())} to {float(picture.max())}")
    for side, found, wanted in zip(("height", "width"), picture.shape[1:], size, strict=True):
        if wanted is not None and found != wanted:
            raise ValueError(f"{name} has {side} {found}, not {wanted}: arrays and tensors are not scaled")
    return picture * 2 - 1


def _check_axes(picture: Picture, channels: int, name: str) -> None:
    """Refuse an array with its channels in front, of which the width would be taken for them."""
    if not isinstance(picture, np.ndarray) or picture.ndim != 3:
        return
    if picture.shape[0] in (1, channels) and picture.shape[2] > max(channels, 4):
        raise ValueError(f"{name} must be an array (H, W, C), got {picture.shape}: a tensor may be (C, H, W)")


def _as_file(picture: str | Path | Image.Image, name: str) -> str | Path | BytesIO:
    """An open picture as a file, so that load_image, the one decoding function, sees it as it would on the disk."""
    if not isinstance(picture, Image.Image):
        return picture
    if picture.mode not in ("F", "I") and (opened := _as_opened(picture, name)) is not None:
        return opened
    try:
        picture.load()
    except Exception as error:  # decoders raise nearly everything
        # that the file is still open, Pillow asserts without words
        reason = one_line(str(error)) or "it was closed before it was read"
        raise ValueError(f"{_called(picture, name)}: cannot be read ({reason})") from error
    if picture.mode == "F" or (picture.mode == "I" and not _is_16_bit(picture)):
        number = "integer" if picture.mode == "I" else "float"
        raise ValueError(
            f"{name} has 32-bit {number} pixels, whose range no one knows: give an array of floats in [0, 1]"
        )
    file, exif = BytesIO(), picture.getexif()
    if picture.mode.startswith("I"):
        picture = picture.convert("I").convert("I;16")  # from I;16B straight on Pillow would clip at 255
    elif picture.mode not in PNG_MODES:
        picture = picture.convert(WITH_ALPHA.get(picture.mode, "RGB"))
    picture.save(file, "PNG", exif=exif, compress_level=0)
    return file


def _as_opened(picture: Image.Image, name: str) -> BytesIO | None:
    """What the file of an open picture holds, unless the picture was loaded or may have been changed since.

    Decoded, Pillow's picture no longer tells how many bits its transparent colour has, nor that its end is missing.
    """
    file = getattr(picture, "fp", None)
    if file is None or not getattr(picture, "tile", None):  # the parts that are still to be decoded
        return None
    try:
        place = file.tell()
        file.seek(0)
        opened = BytesIO(file.read())
        file.seek(place)
        again = Image.open(opened, formats=FORMATS)
        known = [(each.tell(), each.mode, each.size, each.tile, each.info) for each in (picture, again)]
        # a PNG may have EXIF data at its end: asking for them, as who changes them must, loads it
        unasked = picture.format == "PNG" and "exif" not in picture.info
        if known[0] != known[1] or not (unasked or picture.getexif() == again.getexif()):
            return None
    except Exception:  # what is wrong with it comes out when it is loaded
        return None
    opened.name = _called(picture, name)
    return opened


def _called(picture: Image.Image, name: str) -> str:
    """What messages call an open picture: its file, if it has one."""
    filename = getattr(picture, "filename", "")
    return shown(Path(os.fsdecode(filename))) if filename else name


def _is_16_bit(picture: Image.Image) -> bool:
    """Whether a picture of mode I is one of 16 bits, as Pillow had them before it knew I;16."""
    low, high = picture.getextrema()
    return picture.format in (None, "PNG", "PPM") and low >= 0 and high <= 65535


def _resized(image: Image.Image, size: tuple[int | None, int | None]) -> Image.Image:
    height, width = size
    size = (image.width if width is None else width, image.height if height is None else height)
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def _size(picture: Tensor) -> str:
    return f"{picture.shape[1]} x {picture.shape[2]}"
