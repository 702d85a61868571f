"""What this project is compared with: other projects' networks, each trained and sampled by its own project's recipe.

Where each setting comes from: docs/comparison.md. A peer sees pictures (B, C, H, W) in [-1, 1] and what it understands
of a caption: its text, or its class, which is the caption's first word.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from _peer import LAYOUTS, Asked, Classes, Peer, Recipe, Sampler
from torch import Tensor, nn

from unet_attn.data import CaptionedImages
from unet_attn.pipelines.inputs import evaluation_mode

TIMES = 1000
TEXT_DIM, TEXT_DEPTH, TEXT_HEADS, VOCABULARY, MOST_TOKENS = 128, 2, 4, 2048, 32  # our text encoder as the quickstart's


# ------------------------------------------------------------------------------------------ denoising-diffusion-pytorch


_LUCIDRAINS_EXAMPLE = Recipe(
    batch_size=32,
    optimizer=torch.optim.Adam,
    learning_rate=8e-5,
    betas=(0.9, 0.99),
    weight_decay=0.0,
    warmup_steps=0,
    schedule="constant",
    cooldown_fraction=0.0,
    objective="v, cosine betas, 1000 times, half of the classes dropped",
    average="0.995 every 10 steps",
    samplers={
        "main": Sampler("its DDIM", 50, 6.0),
        "fast": Sampler("its DDIM", 25, 6.0),
        "unguided": Sampler("its DDIM", 50, 1.0),
        # its average is made for 100,000 steps: in a short run it is the mean of the run's second half
        "live": Sampler("its DDIM", 50, 6.0, averaged=False),
    },
)


class LucidrainsPeer(Peer):
    """Its class-conditional U-Net in its GaussianDiffusion, averaged by its EMA class."""

    def __init__(self, size: dict[str, Any], *, channels: int, resolution: int, classes: Classes) -> None:
        from denoising_diffusion_pytorch.classifier_free_guidance import GaussianDiffusion, Unet

        class RepairedUnet(Unet):
            """At scale 1 the original returns one tensor where its caller takes two apart."""

            def forward_with_cond_scale(
                self, x: Tensor, time: Tensor, classes: Tensor, cond_scale: float = 1.0, rescaled_phi: float = 0.0
            ) -> tuple[Tensor, Tensor]:
                if cond_scale == 1.0:
                    answer = self(x, time, classes, cond_drop_prob=0.0)
                    return answer, answer
                return super().forward_with_cond_scale(
                    x, time, classes, cond_scale=cond_scale, rescaled_phi=rescaled_phi
                )

        unet = RepairedUnet(**size, num_classes=len(classes.names), channels=channels)
        self.diffusion = GaussianDiffusion(
            unet,
            image_size=resolution,
            timesteps=TIMES,
            objective="pred_v",
            sampling_timesteps=50,
            ddim_sampling_eta=0.0,
        )
        self.classes = classes
        super().__init__([self.diffusion], _LUCIDRAINS_EXAMPLE)

    def start_average(self) -> None:
        from ema_pytorch import EMA

        self.average = EMA(self.diffusion, beta=0.995, update_every=10)

    def update_average(self) -> None:
        self.average.update()

    def loss(self, batch: dict[str, Any]) -> Tensor:
        return self.diffusion((self.pictures(batch) + 1) / 2, classes=self.classes.of[batch["index"]])

    def sample(self, asked: Asked, sampler: Sampler) -> Tensor:
        diffusion = self.average.ema_model if sampler.averaged else self.diffusion
        diffusion.sampling_timesteps = sampler.steps
        with evaluation_mode(diffusion):
            return 2 * diffusion.sample(asked.classes, cond_scale=sampler.guidance) - 1


# ------------------------------------------------------------------------------------------------------------ diffusers

# A guided answer in pixels leads out of [-1, 1]. What is cut there has to count in the rest of the step too, or noise
# stays; and DPM-Solver++, which cuts nothing by itself, runs away. Options of the scheduler, and of its step.
_IN_PIXELS: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "DDIMScheduler": ({}, {"use_clipped_model_output": True}),
    "DPMSolverMultistepScheduler": ({"thresholding": True}, {}),
}
_DIFFUSERS_SAMPLERS = {
    "main": Sampler("DDIMScheduler", 50, 3.0),
    "fast": Sampler("DPMSolverMultistepScheduler", 20, 3.0),
    "unguided": Sampler("DDIMScheduler", 50, 1.0),
}
_UNCONDITIONAL_EXAMPLE = Recipe(
    batch_size=16,
    optimizer=torch.optim.AdamW,
    learning_rate=1e-4,
    betas=(0.95, 0.999),
    weight_decay=1e-6,
    warmup_steps=500,
    schedule="cosine",
    cooldown_fraction=0.0,
    objective="epsilon, linear betas, 1000 times, a tenth of the classes dropped",
    average="up to 0.9999, power 3/4",
    samplers=_DIFFUSERS_SAMPLERS,
)
_TEXT_EXAMPLE = Recipe(
    batch_size=16,
    optimizer=torch.optim.AdamW,
    learning_rate=1e-4,
    betas=(0.9, 0.999),
    weight_decay=1e-2,
    warmup_steps=0,
    schedule="constant",
    cooldown_fraction=0.0,
    objective="epsilon, linear betas, 1000 times, a tenth of the captions dropped",
    average="up to 0.9999, (1 + n) / (10 + n)",
    samplers=_DIFFUSERS_SAMPLERS,
)


class DiffusersPeer(Peer):
    """A U-Net of diffusers with DDPM's loss, averaged by diffusers' EMAModel.

    condition: what the network is told besides picture and time, from N captions and their classes; an empty caption
    is none. The training examples have no guidance for want of that; with it they are no worse off than we are.
    """

    def __init__(
        self,
        unet: nn.Module,
        condition: Callable[[Asked], dict[str, Tensor]],
        recipe: Recipe,
        *,
        classes: Classes,
        text_encoder: nn.Module | None = None,
        power: float | None = None,
    ) -> None:
        from diffusers import DDPMScheduler

        super().__init__([unet] if text_encoder is None else [unet, text_encoder], recipe)
        self.unet, self.condition, self.classes, self.power = unet, condition, classes, power
        self.scheduler = DDPMScheduler(num_train_timesteps=TIMES)

    def start_average(self) -> None:
        from diffusers.training_utils import EMAModel

        warm = {} if self.power is None else {"use_ema_warmup": True, "inv_gamma": 1.0, "power": self.power}
        self.average = EMAModel(self.parameters, decay=0.9999, foreach=True, **warm)

    def update_average(self) -> None:
        self.average.step(self.parameters)

    def loss(self, batch: dict[str, Any]) -> Tensor:
        clean = self.pictures(batch)
        noise, times = torch.randn_like(clean), torch.randint(0, TIMES, (len(clean),))
        noisy = self.scheduler.add_noise(clean, noise, times)
        told = self.condition(Asked(batch["caption"], self.classes.of[batch["index"]]))
        return F.mse_loss(self.unet(noisy, times, **told).sample, noise)

    @torch.no_grad()
    def sample(self, asked: Asked, sampler: Sampler) -> Tensor:
        import diffusers

        options, in_step = _IN_PIXELS[sampler.scheduler]
        scheduler = getattr(diffusers, sampler.scheduler).from_config(self.scheduler.config, **options)
        scheduler.set_timesteps(sampler.steps)
        self.average.store(self.parameters)
        if sampler.averaged:
            self.average.copy_to(self.parameters)
        try:
            told = self.condition(asked)
            nothing = self.condition(Asked([""] * len(asked.captions), asked.classes))
            config = self.unet.config
            shape = (len(asked.captions), config.in_channels, config.sample_size, config.sample_size)
            x = torch.randn(shape).contiguous(memory_format=LAYOUTS[self.layout])
            for time in scheduler.timesteps:
                answer = self.unet(x, time, **told).sample
                if sampler.guidance != 1.0:
                    empty = self.unet(x, time, **nothing).sample
                    answer = empty + sampler.guidance * (answer - empty)  # Ho & Salimans 2022, eq. 6
                x = scheduler.step(answer, time, x, **in_step).prev_sample
        finally:
            self.average.restore(self.parameters)
        return x


def _class_unet(size: dict[str, Any], *, channels: int, resolution: int, classes: Classes) -> Peer:
    from diffusers import UNet2DModel

    none = len(classes.names)  # the class of a picture whose class is not told
    unet = UNet2DModel(
        **size, sample_size=resolution, in_channels=channels, out_channels=channels, num_class_embeds=none + 1
    )

    def condition(asked: Asked) -> dict[str, Tensor]:
        told = torch.tensor([bool(caption) for caption in asked.captions])
        return {"class_labels": torch.where(told, asked.classes, none)}

    return DiffusersPeer(unet, condition, _UNCONDITIONAL_EXAMPLE, classes=classes, power=3 / 4)


def _text_unet(
    size: dict[str, Any], *, channels: int, resolution: int, classes: Classes, captions: Sequence[str]
) -> Peer:
    from diffusers import UNet2DConditionModel

    from unet_attn.pipelines.text_to_image import encode_captions
    from unet_attn.text_encoder import TextEncoder
    from unet_attn.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(captions, VOCABULARY, MOST_TOKENS)
    text_encoder = TextEncoder(len(tokenizer), TEXT_DIM, TEXT_DEPTH, TEXT_HEADS, max_length=MOST_TOKENS)
    unet = UNet2DConditionModel(
        **size, sample_size=resolution, in_channels=channels, out_channels=channels, cross_attention_dim=TEXT_DIM
    )

    def condition(asked: Asked) -> dict[str, Tensor]:
        states, mask = encode_captions(asked.captions, tokenizer=tokenizer, text_encoder=text_encoder)
        return {"encoder_hidden_states": states, "encoder_attention_mask": mask}

    return DiffusersPeer(unet, condition, _TEXT_EXAMPLE, classes=classes, text_encoder=text_encoder)


# ------------------------------------------------------------------------------------------------------------ the table

_CROSS, _DOWN, _UP = "CrossAttnDownBlock2D", "DownBlock2D", "UpBlock2D"
_TEXT_BLOCKS = {
    "down_block_types": (_DOWN, _CROSS, _CROSS),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", _UP),
    "layers_per_block": 2,
    "attention_head_dim": 8,
}
_SMALL_CLASS_BLOCKS = {
    "down_block_types": (_DOWN, "AttnDownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", _UP),
    "layers_per_block": 2,
}

LUCIDRAINS: dict[str, dict[str, Any]] = {
    "ddpm": {"dim": 64, "dim_mults": (1, 2, 4, 8)},
    "ddpm-m": {"dim": 32, "dim_mults": (1, 2, 4, 8)},
    "ddpm-s": {"dim": 32, "dim_mults": (1, 2, 4)},
}
CLASS_UNETS: dict[str, dict[str, Any]] = {
    "unet2d": {
        "block_out_channels": (128, 128, 256, 256, 512, 512),
        "down_block_types": (_DOWN, _DOWN, _DOWN, _DOWN, "AttnDownBlock2D", _DOWN),
        "up_block_types": (_UP, "AttnUpBlock2D", _UP, _UP, _UP, _UP),
        "layers_per_block": 2,
    },
    "unet2d-m": {"block_out_channels": (64, 128, 128), **_SMALL_CLASS_BLOCKS},
    "unet2d-s": {"block_out_channels": (32, 64, 64), **_SMALL_CLASS_BLOCKS},
}
TEXT_UNETS: dict[str, dict[str, Any]] = {
    "unet2d-text": {"block_out_channels": (128, 256, 512), **_TEXT_BLOCKS},
    "unet2d-text-m": {"block_out_channels": (64, 128, 256), **_TEXT_BLOCKS},
    "unet2d-text-s": {"block_out_channels": (32, 64, 128), **_TEXT_BLOCKS},
}
PEERS = (*LUCIDRAINS, *CLASS_UNETS, *TEXT_UNETS)


def check_installed(name: str) -> None:
    """Raise ValueError if an entry's packages are not here, with what brings them."""
    for package in ("denoising_diffusion_pytorch", "ema_pytorch") if name in LUCIDRAINS else ("diffusers",):
        if find_spec(package) is None:
            raise ValueError(
                f"the entry {name} needs {package}, which is not installed: pip install 'unet-attn[bench]'"
            )


def make_peer(name: str, data: CaptionedImages) -> Peer:
    """An entry's network for these pictures, with weights from torch's global generator."""
    classes = Classes(data)
    about = {"channels": data.channels, "resolution": data.options.resolution, "classes": classes}
    if name in LUCIDRAINS:
        return LucidrainsPeer(LUCIDRAINS[name], **about)
    if name in CLASS_UNETS:
        return _class_unet(CLASS_UNETS[name], **about)
    captions = [caption for variants in data.captions for caption in variants]
    return _text_unet(TEXT_UNETS[name], **about, captions=captions)
