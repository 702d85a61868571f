"""Captions to vectors: a small encoder trained with the U-Net, or a frozen text model of transformers.

Both are called as `encoder(input_ids, attention_mask)` and give `last_hidden_state` (B, N, D), which the U-Net
cross-attends to, and `pooler_output` (B, D), its mean over the real tokens. B batch, N tokens, D = `output_dim`.
"""

from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils import BaseOutput
from torch import Tensor, nn

from unet_attn.strict_loading import StrictLoading, is_whole
from unet_attn.transformer import EncoderLayer, TokenEmbedding, masked_mean

FORMAT_VERSION = 1


@dataclass
class TextEncoderOutput(BaseOutput):
    """last_hidden_state: (B, N, D); pooler_output: (B, D)."""

    last_hidden_state: Tensor
    pooler_output: Tensor


class TextEncoder(StrictLoading, ModelMixin, ConfigMixin):
    """A pre-norm Transformer encoder over token ids, made to be trained from scratch on a person's own captions."""

    @register_to_config
    def __init__(
        self,
        vocab_size: int,
        dim: int = 128,
        depth: int = 2,
        heads: int = 4,
        max_length: int = 32,
        format_version: int = FORMAT_VERSION,
    ) -> None:
        super().__init__()
        _check_format_version(format_version)
        for key in ("vocab_size", "dim", "depth", "heads", "max_length"):
            if not is_whole(self.config[key]):
                raise ValueError(f"text_encoder.{key} must be a whole number, got {self.config[key]!r}")
            if self.config[key] < 1:
                raise ValueError(f"text_encoder.{key} must be at least 1, got {self.config[key]}")
        if dim % heads:
            raise ValueError(f"text_encoder.heads must divide text_encoder.dim {dim}, got {heads}")
        self.embedding = TokenEmbedding(vocab_size, dim, max_length)
        self.layers = nn.ModuleList(EncoderLayer(dim, heads, 4 * dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    @property
    def output_dim(self) -> int:
        """Width of the vectors it gives."""
        return self.config.dim

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> TextEncoderOutput:
        """input_ids: (B, N) integers; attention_mask: (B, N), non-zero = a real token.

        Raises ValueError if N exceeds max_length.
        """
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        x = self.norm(x)
        return TextEncoderOutput(last_hidden_state=x, pooler_output=masked_mean(x, attention_mask))


class PretrainedText(StrictLoading, ModelMixin, ConfigMixin):
    """A frozen text model of transformers in the small encoder's place.

    path: a folder or hub id that transformers' AutoModel reads; of an encoder with a decoder the encoder is taken, of a
    model of pictures and text (CLIP, SigLIP) the text's. The weights are saved with the pipeline, but they are not
    trained: their gradients are off and the model stays in evaluation mode. Whatever their dtype in `path`, they have
    torch's default, as those of the other networks. Raises ValueError for a model that is not of text.
    """

    @register_to_config
    def __init__(self, path: str, model_config: dict | None = None, format_version: int = FORMAT_VERSION) -> None:
        super().__init__()
        _check_format_version(format_version)
        from transformers import AutoConfig, AutoModel

        if model_config is None:
            # transformers would take it for a hub id and complain of its letters
            if not Path(path).is_dir() and (Path(path).is_absolute() or path.startswith(".")):
                raise FileNotFoundError(f"text_encoder.path {path}: there is no such folder")
            model = AutoModel.from_pretrained(path, dtype=torch.get_default_dtype())
        else:
            # diffusers makes the dtype that a model is loaded in the default
            model = AutoModel.from_config(AutoConfig.for_model(**model_config), dtype=torch.get_default_dtype())
        model = getattr(model, "text_model", model)
        if model_config is None:  # with it kept, a saved pipeline loads where `path` does not exist
            self.register_to_config(model_config=model.config.to_dict())
        # a decoder would need input of its own, and shares its embedding with the encoder, which cannot be saved. The
        # configuration of an encoder that was saved alone does not tell of the decoder that AutoModel makes
        self.model = model.get_encoder() if hasattr(model, "decoder") else model
        if getattr(self.model.config, "hidden_size", None) is None:
            raise ValueError(f"text_encoder.path {path}: a {type(model).__name__} is no text model with a hidden_size")
        if "input_ids" not in signature(self.model.forward).parameters:
            raise ValueError(
                f"text_encoder.path {path}: a {type(model).__name__} is no text model, it takes no input_ids"
            )
        self.requires_grad_(False)
        self.eval()

    @property
    def output_dim(self) -> int:
        """Width of the vectors it gives."""
        return self.model.config.hidden_size

    def train(self, mode: bool = True) -> "PretrainedText":
        """Stays in evaluation mode: a frozen model with dropout would give a caption another meaning each time."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> TextEncoderOutput:
        """input_ids: (B, N) integers; attention_mask: (B, N), non-zero = a real token."""
        x = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return TextEncoderOutput(last_hidden_state=x, pooler_output=masked_mean(x, attention_mask))


def _check_format_version(found: int) -> None:
    if found != FORMAT_VERSION:
        raise ValueError(
            f"this text encoder has format_version {found}, this release of unet-attn reads {FORMAT_VERSION}: "
            f"install a release that reads {found}"
        )
