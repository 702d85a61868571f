"""Sample pictures from an exported model without torch.

    python sample.py --prompt "a heart" "cloud upload" --steps 25 --seed 7 --out pictures

Picture n has the seed --seed + n, which stands in its file name before the prompt. No file is ever overwritten: where
another of the same name lies, the new one's name ends in -2.

Needs numpy, onnxruntime, pillow and, for a model with text, tokenizers. It lies beside the model, as
scripts/export.py wrote it; read it as an example of how to call the model from another language or program.
"""

import argparse
import json
import math
import os
import re
import sys
import warnings
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import onnxruntime

FLOW_TIME_SCALE = 1000.0  # a flow network is given 1000 t


class NumpySampler:
    """An exported folder: unet.onnx, settings.json and, with text, text_encoder.onnx and tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        self.settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        self.unet = onnxruntime.InferenceSession(folder / "unet.onnx")
        self.text_encoder = self.tokenizer = None
        if self.settings["text"] is not None:
            from tokenizers import Tokenizer

            self.text_encoder = onnxruntime.InferenceSession(folder / "text_encoder.onnx")
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.tokenizer.enable_truncation(self.settings["text"]["max_length"])
            self.tokenizer.enable_padding(pad_id=self.settings["text"]["pad_id"])
            self.tokenizer.encode_special_tokens = True  # what a caption writes like one is text

    def sample(
        self,
        prompts: list[str],
        latents: np.ndarray,
        *,
        steps: int | None = None,
        guidance_scale: float | None = None,
        negative_prompt: str = "",
    ) -> np.ndarray:
        """prompts: B, empty for a model without text; latents: noise (B, C, H, W). Returns (B, H, W, C) in [0, 1].

        steps, guidance_scale: None = the numbers that were saved with the pipeline.
        Raises ValueError if guidance_scale or what the network says is not finite, steps does not fit, or a model
        without text is given a prompt or a negative one. Warns of what has no effect.
        """
        self.check_guidance(prompts, guidance_scale, negative_prompt)
        steps = self.settings["default_steps"] if steps is None else steps
        guidance_scale = self.settings["default_guidance_scale"] if guidance_scale is None else guidance_scale
        if not math.isfinite(guidance_scale):
            raise ValueError(f"guidance_scale must be a finite number, got {guidance_scale}")
        text = self.encode([negative_prompt] * len(prompts) + prompts) if self.text_encoder else {}
        x = latents.astype(np.float32)
        for level, following in pairwise(self.noise_levels(steps)):
            with np.errstate(over="ignore", invalid="ignore"):  # it is told below, in one line
                x = self.step(x, self.predict(x, level[0], text, guidance_scale), level, following)
            if not np.isfinite(x).all():  # it would be a black picture
                raise ValueError(f"the numbers overflow: guidance_scale {guidance_scale} or the model is at fault")
        return (x / 2 + 0.5).clip(0, 1).transpose(0, 2, 3, 1)

    def check_guidance(self, prompts: list[str], guidance_scale: float | None, negative_prompt: str) -> None:
        """Refuse text for a model without it, and tell of guidance that there is not, as the pipeline does."""
        own = self.settings["default_guidance_scale"]
        if self.text_encoder is None:
            if any(prompts) or negative_prompt:
                name = "prompt" if any(prompts) else "negative_prompt"
                raise ValueError(f"this model was trained without text: it takes no {name}")
            if guidance_scale not in (None, 1, own):
                warnings.warn("guidance_scale has no effect on a model without text", stacklevel=3)
        elif negative_prompt and (own if guidance_scale is None else guidance_scale) == 1:
            warnings.warn("negative_prompt has no effect at guidance_scale 1", stacklevel=3)

    def encode(self, captions: list[str]) -> dict[str, np.ndarray]:
        """The U-Net's two text inputs."""
        tokens = self.tokenizer.encode_batch(captions)
        ids, mask = (np.array([getattr(each, name) for each in tokens]) for name in ("ids", "attention_mask"))
        (states,) = self.text_encoder.run(None, {"input_ids": ids, "attention_mask": mask})
        return {"encoder_hidden_states": states, "encoder_attention_mask": mask}

    def predict(self, x: np.ndarray, time: float, text: dict[str, np.ndarray], guidance_scale: float) -> np.ndarray:
        """What the network says of x at a time, under guidance: u + s (c - u), Ho & Salimans 2022, eq. 6."""
        sample = np.concatenate([x, x]) if text else x
        timestep = np.full(len(sample), time, dtype=np.float32)
        (prediction,) = self.unet.run(None, {"sample": sample, "timestep": timestep, **text})
        if not text:
            return prediction
        unconditional, conditional = np.split(prediction, 2)
        return unconditional + np.float32(guidance_scale) * (conditional - unconditional)

    def noise_levels(self, steps: int) -> list[tuple[float, float, float]]:
        """(the network's time, alpha, sigma) of x = alpha clean + sigma noise, from noise to the clean picture."""
        schedule = self.settings["schedule"]
        trained = schedule["num_train_timesteps"]
        if not 1 <= steps <= trained:
            raise ValueError(f"steps must be from 1 to {trained}, got {steps}")
        if self.settings["prediction_type"] == "flow":
            times = np.linspace(schedule["sigma_max"], schedule["sigma_min"], steps)
            times = schedule["shift"] * times / (1 + (schedule["shift"] - 1) * times)
            return [(FLOW_TIME_SCALE * time, 1 - time, time) for time in (*times.tolist(), 0.0)]

        if schedule["timestep_spacing"] == "leading":
            times = np.arange(steps)[::-1] * (trained // steps) + schedule["steps_offset"]
        else:
            times = np.round(np.arange(trained, 0, -trained / steps)).astype(int)[:steps] - 1
        if max(times) >= trained:
            raise ValueError(
                f"steps_offset={schedule['steps_offset']} comes to timestep {max(times)} in {steps} steps, "
                f"and {trained - 1} is the last that was trained: take fewer steps"
            )
        alphas = [*(schedule["alphas_cumprod"][time] for time in times), schedule["final_alpha_cumprod"]]
        return [(float(time), alpha**0.5, (1 - alpha) ** 0.5) for time, alpha in zip((*times, 0), alphas, strict=True)]

    def step(
        self,
        x: np.ndarray,
        prediction: np.ndarray,
        level: tuple[float, float, float],
        following: tuple[float, float, float],
    ) -> np.ndarray:
        """From one noise level to the next: Euler for a flow, else DDIM without noise (Song et al. 2021, eq. 12)."""
        (_, alpha, sigma), (_, next_alpha, next_sigma) = level, following
        kind = self.settings["prediction_type"]
        if kind == "flow":
            return (x + (next_sigma - sigma) * prediction).astype(np.float32)
        if kind == "epsilon":
            noise, clean = prediction, (x - sigma * prediction) / alpha
        elif kind == "sample":
            noise, clean = (x - alpha * prediction) / sigma, prediction
        else:  # v_prediction
            noise, clean = alpha * prediction + sigma * x, alpha * x - sigma * prediction
        limit = self.settings["schedule"]["clip_sample_range"]
        clean = clean if limit is None else clean.clip(-limit, limit)
        return (next_alpha * clean + next_sigma * noise).astype(np.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", nargs="+", default=[""], help="one or several captions")
    parser.add_argument("--negative_prompt", default="", help="what to lead away from")
    parser.add_argument("--steps", type=int, help="by default the pipeline's own")
    parser.add_argument("--guidance_scale", type=float, help="by default the pipeline's own")
    parser.add_argument("--seed", type=int, default=0, help="picture n has seed + n; not the noise of torch's seed")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    options = parser.parse_args()
    try:
        write_pictures(NumpySampler(Path(__file__).parent), options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def write_pictures(sampler: NumpySampler, options: argparse.Namespace) -> None:
    from PIL import Image

    settings = sampler.settings
    size = [settings["sample_size"] if side is None else side for side in (options.height, options.width)]
    for name, side in zip(("height", "width"), size, strict=True):
        if side < 1 or side % settings["downsample_factor"]:
            raise ValueError(f"{name} must be a multiple of {settings['downsample_factor']}, got {side}")
    seeds = [options.seed + number for number in range(len(options.prompt))]
    noise = np.stack([np.random.default_rng(seed).standard_normal((settings["channels"], *size)) for seed in seeds])
    pictures = sampler.sample(
        options.prompt,
        noise,
        steps=options.steps,
        guidance_scale=options.guidance_scale,
        negative_prompt=options.negative_prompt,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for seed, prompt, picture in zip(seeds, options.prompt, pictures, strict=True):
        pixels = (255 * picture).round().astype(np.uint8)
        image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        wanted = options.out / name_of(seed, prompt)
        path = write_picture(image, wanted)
        if path != wanted:
            print(f"note: {wanted.name} is another picture, so this one is {path.name}", file=sys.stderr)
    print(f"wrote {len(seeds)} picture{'s' if len(seeds) > 1 else ''} to {options.out}")


def name_of(seed: int, prompt: str) -> str:
    words = re.sub(r"\W+", "-", prompt).strip("-").lower()[:40]
    return f"{seed:05d}-{words}.png" if words else f"{seed:05d}.png"


def write_picture(image: "Image.Image", path: Path) -> Path:  # noqa: F821  pillow is imported late
    """Writes a PNG and returns its path, which ends in -2, -3, ... where other files lie."""
    for number in count(1):
        free = path if number == 1 else path.with_name(f"{path.stem}-{number}.png")
        if not os.path.lexists(free):
            image.save(free)
            return free
        if is_same(free, image):
            return free


def is_same(path: Path, image: "Image.Image") -> bool:  # noqa: F821
    """Whether a file holds this picture."""
    from PIL import Image

    try:
        with Image.open(path) as there:
            return there.mode == image.mode and np.array_equal(np.asarray(there), np.asarray(image))
    except (OSError, ValueError, SyntaxError):  # no picture, or a damaged one
        return False


if __name__ == "__main__":
    sys.exit(main())
