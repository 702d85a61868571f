"""What is trained, as one module: the U-Net and, if there is text, the encoder that conditions it."""

from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from unet_attn.ema import trainable
from unet_attn.encodings import RememberedEncodings
from unet_attn.loss_weights import NoiseUncertainty
from unet_attn.pipelines.captions import check_tokenizer
from unet_attn.pipelines.parts import check_unshared
from unet_attn.pipelines.text_to_image import encode_captions
from unet_attn.unet import AttnUNet2D


class TextConditionalUNet(nn.Module):
    """A U-Net with its text encoder and tokenizer, both None for a model without text.

    uncertainty: learns how uncertain the prediction is at each noise level, for a loss that is weighed by it.
    One module, so that wrappers (DDP) see every gradient. A frozen text encoder is asked once for each caption.
    Raises ValueError if a weight stands in two places, naming both: it could not be saved so; and if tokenizer and text
    encoder do not go together.
    """

    def __init__(
        self,
        unet: AttnUNet2D,
        text_encoder: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
        uncertainty: NoiseUncertainty | None = None,
    ) -> None:
        super().__init__()
        check_unshared(unet=unet, text_encoder=text_encoder)
        if text_encoder is not None and tokenizer is not None:
            check_tokenizer(tokenizer, text_encoder)
        self.unet = unet
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer
        self.uncertainty = uncertainty
        self.encode = partial(encode_captions, tokenizer=tokenizer, text_encoder=text_encoder)
        if text_encoder is not None and not trainable(text_encoder):
            self.encode = RememberedEncodings(self.encode)

    def forward(self, sample: Tensor, timestep: Tensor, captions: list[str]) -> tuple[Tensor, Tensor | None]:
        """sample: (B, C, H, W); timestep: (B,); captions: B strings, unused without text.

        Returns the prediction (B, C, H, W), and the log variance of its error (B,), None if that is not learned.
        """
        log_variance = None if self.uncertainty is None else self.uncertainty(timestep)
        if self.text_encoder is None:
            return self.unet(sample, timestep).sample, log_variance
        states, mask = self.encode(captions)
        return self.unet(sample, timestep, states.to(self.unet.dtype), mask).sample, log_variance

    def speed_up(self, *, compile: bool, checkpointing: bool) -> None:
        """Change how fast or how lean a pass is, and not what it computes."""
        if checkpointing:
            self.unet.enable_gradient_checkpointing()
        if compile:
            for network in filter(None, (self.unet, self.text_encoder)):
                # In place: names in checkpoints stay what they are. With its layout optimization torch 2.14 fails in
                # the backward pass of convolutions at the third length of captions.
                network.compile(options={"layout_optimization": False})
