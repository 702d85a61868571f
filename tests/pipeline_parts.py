"""Small pipelines for the tests: real parts of a few thousand weights, and networks whose answer is known."""

import torch
from diffusers import ConfigMixin, DDIMScheduler, FlowMatchEulerDiscreteScheduler, ModelMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import Tensor, nn

from unet_attn.objective import Objective
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.text_encoder import TextEncoder
from unet_attn.tokenizer import train_tokenizer
from unet_attn.unet import AttnUNet2D

CAPTIONS = ["a red heart", "cloud upload", "a very blue sky over the sea"]
DIM = 12


def scheduler_for(prediction_type: str, settings: dict[str, object] | None = None) -> SchedulerMixin:
    training_class = FlowMatchEulerDiscreteScheduler if prediction_type == "flow" else DDIMScheduler
    training = training_class(**(settings or {}))
    return Objective(training, prediction_type=prediction_type).sampling_scheduler()


def text_parts(seed: int = 0) -> tuple[TextEncoder, object]:
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(CAPTIONS, vocab_size=300, max_length=11)
    return TextEncoder(len(tokenizer), dim=DIM, depth=1, heads=3, max_length=11).eval(), tokenizer


def tiny_unet(
    *, context_dim: int | None = DIM, channels: int = 3, seed: int = 0, x_prediction: bool = False
) -> AttnUNet2D:
    """A U-Net with factor 4, whose zero-initialised layers are stirred so that its input and text matter."""
    torch.manual_seed(seed)
    unet = AttnUNet2D(
        sample_size=12,
        in_channels=channels,
        out_channels=channels,
        block_channels=(8, 16),
        attention_levels=(1,),
        dim_head=8,
        context_dim=context_dim,
        patch_size=2,
        x_prediction=x_prediction,
    )
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return unet.eval()


def tiny_pipeline(prediction_type: str = "flow", *, channels: int = 3, seed: int = 0) -> TextToImagePipeline:
    text_encoder, tokenizer = text_parts(seed)
    unet = tiny_unet(channels=channels, seed=seed)
    return quiet(TextToImagePipeline(unet, scheduler_for(prediction_type), text_encoder, tokenizer))


def tiny_unconditional(prediction_type: str = "flow", *, channels: int = 3) -> TextToImagePipeline:
    unet = tiny_unet(context_dim=None, channels=channels)
    return quiet(TextToImagePipeline(unet, scheduler_for(prediction_type)))


def quiet(pipeline: TextToImagePipeline) -> TextToImagePipeline:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def seeds(*numbers: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(number) for number in numbers]


class StubUNet(ModelMixin, ConfigMixin):
    """A network that answers what `answer(sample, timestep, context)` says, and keeps what it was called with."""

    @register_to_config
    def __init__(
        self, sample_size: int = 12, in_channels: int = 3, out_channels: int = 3, context_dim: int | None = None
    ):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))
        self.calls: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self.modes: list[bool] = []
        self.downsample_factor = 4
        self.answer = lambda sample, timestep, context: torch.zeros_like(sample)

    def forward(self, sample, timestep, encoder_hidden_states=None, encoder_attention_mask=None):
        self.calls.append((sample, timestep, encoder_hidden_states))
        self.modes.append(self.training)
        return UNet2DOutput(sample=self.answer(sample, timestep, encoder_hidden_states))


def stub_pipeline(prediction_type: str = "flow", *, with_text: bool = False) -> TextToImagePipeline:
    """A pipeline around a StubUNet, which answers 0 unless told otherwise."""
    text_encoder, tokenizer = text_parts() if with_text else (None, None)
    unet = StubUNet(context_dim=DIM if with_text else None)
    return quiet(TextToImagePipeline(unet, scheduler_for(prediction_type), text_encoder, tokenizer))


def oracle(
    clean: Tensor, prediction_type: str, alphas_cumprod: Tensor | None = None, scales: list[float] | None = None
) -> StubUNet:
    """A network that always answers rightly for the picture `clean` (1, C, H, W).

    scales: as from `with_recorded_scales`; its last number, unless 1, is the alpha that the input was scaled to.
    """

    def answer(sample: Tensor, timestep: Tensor, context: Tensor | None) -> Tensor:
        time = float(timestep)
        if prediction_type == "flow":
            return (sample - clean) * 1000 / time
        alpha = scales[-1] if scales and scales[-1] != 1 else float(alphas_cumprod[int(time)].double().sqrt())
        sigma = (1 - alpha**2) ** 0.5
        noise = (sample - alpha * clean) / sigma
        return {"epsilon": noise, "sample": clean.expand_as(sample), "v_prediction": alpha * noise - sigma * clean}[
            prediction_type
        ]

    unet = StubUNet(sample_size=clean.shape[-1])
    unet.answer = answer
    return unet


def with_recorded_scales(scheduler_class: type[SchedulerMixin]) -> tuple[type[SchedulerMixin], list[float]]:
    """The class, and a list to which it adds the factor that it scales each model input by.

    Euler and its kin divide by sqrt(1 + sigma^2), which is the alpha of their own noise level; some of them stand
    between two trained timesteps, where the timestep alone does not say which.
    """
    scales: list[float] = []
    if not hasattr(scheduler_class, "scale_model_input"):
        return scheduler_class, scales

    class Recording(scheduler_class):
        def scale_model_input(self, sample, timestep=None):
            scales.append(float(super().scale_model_input(torch.ones(1, dtype=torch.float64), timestep)))
            return super().scale_model_input(sample, timestep)

    return Recording, scales
