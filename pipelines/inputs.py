"""What every pipeline does at its door: checks of the caller's arguments, and pictures out of tensors.

Each check raises a ValueError of one line that names the argument, what was expected and what came.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from numbers import Integral, Real

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor, nn

OUTPUT_TYPES = ("pil", "np", "pt", "latent")
PIL_MODES = {1: "L", 3: "RGB"}
GUIDANCE_LIMIT = 1e6  # about where float32 keeps nothing of u in u + s (c - u)


def check_prompts(prompt: str | Sequence[str] | None, *, has_text: bool) -> list[str]:
    """The prompts, one or a list or tuple of them, as a list; of a model without text, one empty prompt."""
    if not has_text:
        if prompt is not None:
            raise ValueError("this model was trained without text: call it with prompt=None")
        return [""]
    if prompt is None:
        raise ValueError("this model needs a prompt; the empty caption is prompt=''")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list | tuple) or not prompts:
        raise ValueError(f"prompt must be a string or a non-empty list of strings, got {describe(prompt)}")
    for text in prompts:
        if not isinstance(text, str):
            raise ValueError(f"prompt must be a string or a list of strings, got a list with {describe(text)}")
        _check_text("prompt", text)
    return list(prompts)


def check_negative_prompts(negative_prompt: str | Sequence[str] | None, *, prompts: int, has_text: bool) -> list[str]:
    """One negative prompt for each of the prompts: a single one is for all, None is the empty caption."""
    if negative_prompt is None:
        return [""] * prompts
    if not has_text:
        raise ValueError("this model was trained without text: it takes no negative_prompt")
    if isinstance(negative_prompt, str):
        negative_prompt = [negative_prompt] * prompts
    if not isinstance(negative_prompt, list | tuple) or not all(isinstance(text, str) for text in negative_prompt):
        raise ValueError(f"negative_prompt must be a string or a list of strings, got {describe(negative_prompt)}")
    if len(negative_prompt) != prompts:
        raise ValueError(
            f"there are {len(negative_prompt)} negative prompts for {prompts} prompts: give one, or one each"
        )
    for text in negative_prompt:
        _check_text("negative_prompt", text)
    return list(negative_prompt)


def _check_text(name: str, text: str) -> None:
    """Refuse halves of characters, which bytes that are no UTF-8 become on a command line: no tokenizer takes them."""
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{name} has half a character (a lone surrogate), so it is no text: {describe(text)}")


def check_count(name: str, value: int) -> int:
    """A whole number of at least 1, numpy's own included."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


def check_number(name: str, value: float) -> float:
    """A finite number, numpy's own included."""
    if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def check_eta(value: float) -> float:
    """A share of the noise that a step may add (Song et al. 2021, eq. 16): above 1 there is no room for it."""
    eta = check_number("eta", value)
    if not 0 <= eta <= 1:
        raise ValueError(f"eta must lie in 0..1, got {value!r}")
    return eta


def check_guidance_scale(value: float, name: str = "guidance_scale") -> float:
    """A number that float32 can weigh two answers with."""
    scale = check_number(name, value)
    if abs(scale) > GUIDANCE_LIMIT:
        raise ValueError(f"{name} must lie within {GUIDANCE_LIMIT:g} of 0, got {value!r}")
    return scale


def check_kind(name: str, value: object, kind: type) -> None:
    """An object of the class, or of its namesake: in a saved folder's code our classes are copies of their own."""
    if not is_kind(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {describe(value)}")


def is_kind(value: object, kind: type) -> bool:
    return any(base.__name__ == kind.__name__ for base in type(value).__mro__)


def check_steps(steps: int, trained_steps: int) -> int:
    """A number of inference steps that the schedule holds."""
    steps = check_count("num_inference_steps", steps)
    if steps > trained_steps:
        raise ValueError(f"num_inference_steps must be at most {trained_steps}, the number trained with, got {steps}")
    return steps


def check_size(height: int, width: int, factor: int) -> tuple[int, int]:
    """Sides in pixels that the U-Net can work at; another size is refused, never rounded."""
    for name, side in (("height", height), ("width", width)):
        if isinstance(side, bool) or not isinstance(side, Integral) or side < 1 or side % factor:
            raise ValueError(
                f"{name} must be a positive multiple of {factor} (the U-Net's downsample_factor), got {side!r}"
            )
    return int(height), int(width)


def check_latents(latents: Tensor, height: int | None, width: int | None, factor: int) -> tuple[int, int]:
    """The height and width of start noise, where the caller gave no others; factor must divide its sides."""
    if not isinstance(latents, Tensor) or latents.ndim != 4:
        raise ValueError("latents must be a tensor (pictures, channels, height, width)")
    if any(side < 1 or side % factor for side in latents.shape[2:]):
        raise ValueError(
            f"latents must have a height and width that are multiples of {factor} (the U-Net's downsample_factor), "
            f"got {tuple(latents.shape)}"
        )
    if not bool(latents.isfinite().all()):
        raise ValueError("latents hold NaN or infinity")
    return (latents.shape[2] if height is None else height), (latents.shape[3] if width is None else width)


def check_output_type(output_type: str, channels: int) -> str:
    """A known output type that can hold pictures of this many channels."""
    if output_type not in OUTPUT_TYPES:
        raise ValueError(f"output_type must be one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}")
    if output_type == "pil" and channels not in PIL_MODES:
        raise ValueError(f"output_type pil needs pictures of 1 or 3 channels, these have {channels}: use np or pt")
    return output_type


def check_generators(
    generator: torch.Generator | Sequence[torch.Generator] | None, *, pictures: int, device: torch.device
) -> torch.Generator | list[torch.Generator] | None:
    """None (torch's global one), one generator for all pictures, or one each, on the CPU or on the model's device."""
    if generator is None:
        return None
    generator = list(generator) if isinstance(generator, tuple) else generator
    generators = generator if isinstance(generator, list) else [generator]
    for each in generators:
        if not isinstance(each, torch.Generator):
            raise ValueError(f"generator must be a torch.Generator or a list of them, got {describe(each)}")
        if each.device.type not in ("cpu", device.type):
            raise ValueError(f"a generator on {each.device} cannot draw for a model on {device}: use a CPU generator")
    if isinstance(generator, list) and len(generator) != pictures:
        raise ValueError(f"got {len(generator)} generators for {pictures} pictures: give one, or one per picture")
    if len({each.device.type for each in generators}) > 1:
        raise ValueError("the generators are on different devices: put all of them on the CPU")
    return generator


def check_callback_names(names: Sequence[str] | None, known: tuple[str, ...]) -> list[str]:
    """The tensors that a callback asks for, by default all that it may."""
    if isinstance(names, str):
        raise ValueError(f"callback_on_step_end_tensor_inputs must be a list, got the string {names!r}")
    unknown = [str(name) for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"callback_on_step_end_tensor_inputs may name {', '.join(known)}, got {', '.join(unknown)}")
    return list(known if names is None else names)


def check_callback_answer(answer: dict[str, Tensor] | None, latents: Tensor) -> Tensor:
    """The latents to go on with: those that a callback gave back, in the dtype they had, or the ones it was shown."""
    if answer is None:
        return latents
    if not isinstance(answer, dict) or not set(answer) <= {"latents"}:
        raise ValueError(f"callback_on_step_end must return None or a dict with latents, got {describe(answer)}")
    changed = answer.get("latents", latents)
    if not isinstance(changed, Tensor) or changed.shape != latents.shape:
        found = tuple(changed.shape) if isinstance(changed, Tensor) else describe(changed)
        raise ValueError(f"callback_on_step_end must return latents of shape {tuple(latents.shape)}, got {found}")
    return changed.to(latents)


def check_finite(finite: Tensor) -> None:
    """Refuse pictures that hold NaN or infinity, which would be saved as black. finite: (B,) bool."""
    if not bool(finite.all()):
        bad = (~finite).nonzero().flatten().tolist()
        raise ValueError(
            f"picture {', '.join(map(str, bad))} of {len(finite)} (counted from 0) came out as NaN or infinity: "
            "the weights are broken, or the dtype is too narrow (try float32)"
        )


def to_output(pictures: Tensor, output_type: str) -> list[Image.Image] | np.ndarray | Tensor:
    """Pictures in [-1, 1], clamped, as the caller wants them.

    pictures: (B, C, H, W) finite. Returns for `pt` (B, C, H, W) and for `np` (B, H, W, C), both float32 in [0, 1], and
    for `pil` a list of 8-bit pictures, grey ones in mode L; for `latent` the pictures as they are, unclamped.
    """
    if output_type == "latent":
        return pictures
    unit = (pictures.float() / 2 + 0.5).clamp(0, 1)
    if output_type == "pt":
        return unit
    array = rearrange(unit, "b c h w -> b h w c").cpu().numpy()
    if output_type == "np":
        return array
    pixels = (array * 255).round().astype(np.uint8)
    return [Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture) for picture in pixels]


@contextmanager
def evaluation_mode(*modules: nn.Module | None) -> Iterator[None]:
    """Switch the modules to evaluation, and every one of their parts back to what it was, even when the body fails."""
    before = {part: part.training for module in modules if module is not None for part in module.modules()}
    try:
        for module in modules:
            if module is not None:
                module.eval()
        yield
    finally:
        for part, training in before.items():
            part.training = training


def describe(value: object) -> str:
    """A value and its type in a few words, for a message."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
