"""Pictures, a configuration and a judge for the tests of whole trainings that are compared, all tiny."""

import json
from pathlib import Path

import torch
from PIL import Image

from unet_attn.data import CaptionedImages, DataOptions
from unet_attn.judge import Judge, JudgeSize
from unet_attn.tokenizer import train_tokenizer

WORDS = ("Arrow:", "cloud", "file")
COUNT = 101  # pictures, and captions, of which a judge needs 100
TINY = """
data: {path: none, resolution: 8, caption_dropout: 0.1}
text_encoder: {class_path: unet_attn.text_encoder.TextEncoder, init_args: {dim: 8, depth: 1, heads: 2}}
tokenizer: {vocab_size: 300, max_length: 8}
unet: {in_channels: 1, block_channels: [8], layers_per_block: 1, attention_levels: [], dim_head: 4, patch_size: 4}
scheduler: {class_path: diffusers.FlowMatchEulerDiscreteScheduler, init_args: {}}
objective: {prediction_type: flow}
train: {output_dir: none, batch_size: 11, optimizer: adamw, sample_prompts: [cloud]}
"""
JUDGE = JudgeSize(
    image_size=8, channels=1, patch_size=4, dim=8, depth=1, heads=2, text_dim=8, text_depth=1, embedding_dim=8
)


def quality_folder(root: Path) -> Path:
    """COUNT grey pictures of 8 px, each with a caption of its own, and TINY as tiny.yaml beside them."""
    data = root / "data"
    data.mkdir()
    pixels = torch.randint(0, 256, (COUNT, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for number, picture in enumerate(pixels):
        Image.fromarray(picture.numpy()).save(data / f"{number:03}.png")
    rows = [{"file_name": f"{n:03}.png", "text": f"{WORDS[n % 3]} {n}"} for n in range(COUNT)]
    (data / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (root / "tiny.yaml").write_text(TINY, encoding="utf-8")
    torch.manual_seed(0)
    judge = Judge(JUDGE, train_tokenizer(["arrow cloud file 0 1 2"], vocab_size=300, max_length=11))
    judge.record = {"held_out_agreement": 0.625}
    judge.save(root / "judge")
    return root


def pictures(folder: Path) -> CaptionedImages:
    return CaptionedImages(DataOptions(path=str(folder / "data"), resolution=8, caption_dropout=0.5), channels=1)
