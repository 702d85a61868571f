"""Text-to-image diffusion trained from scratch, on one query/key/value attention.

Names are looked up on first use (PEP 562), so `import unet_attn` and `import unet_attn.attention` import neither
diffusers nor transformers, which take over ten seconds on a small machine.
"""

from importlib import import_module

_MODULE_OF = {
    "AttentionChoice": "unet_attn.pipelines.attention_maps",
    "AttentionHead": "unet_attn.attention",
    "AttnUNet2D": "unet_attn.unet",
    "CaptionedImages": "unet_attn.data",
    "Captioner": "unet_attn.captioner",
    "CrossAttention2d": "unet_attn.attention",
    "DataOptions": "unet_attn.data_options",
    "DecoderLayer": "unet_attn.transformer",
    "EncoderLayer": "unet_attn.transformer",
    "FeedForward": "unet_attn.transformer",
    "Guidance": "unet_attn.pipelines.guidance",
    "ImageTransformer": "unet_attn.image_transformer",
    "ImageToImagePipeline": "unet_attn.pipelines.image_to_image",
    "InpaintPipeline": "unet_attn.pipelines.inpaint",
    "InterpolationPipeline": "unet_attn.pipelines.interpolate",
    "Judge": "unet_attn.judge",
    "MultiHeadAttention": "unet_attn.attention",
    "Objective": "unet_attn.objective",
    "PretrainedText": "unet_attn.text_encoder",
    "SelfAttention2d": "unet_attn.attention",
    "TextEncoder": "unet_attn.text_encoder",
    "TextToImagePipeline": "unet_attn.pipelines.text_to_image",
    "Transformer": "unet_attn.transformer",
    "causal_mask": "unet_attn.transformer",
    "encode_captions": "unet_attn.pipelines.text_to_image",
    "load_image": "unet_attn.data",
    "multi_head_attention": "unet_attn.attention",
    "train_tokenizer": "unet_attn.tokenizer",
}

__all__ = sorted(_MODULE_OF)  # the function `attention` is not among them: that name is the module's


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
