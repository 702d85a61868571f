"""A configuration of scripts/train.py that trains in seconds, over tiny pictures with captions."""

from pathlib import Path

import numpy as np
import yaml
from PIL import Image

PICTURES = 13


def write_config(folder: Path, **train: object) -> Path:
    """FOLDER/config.yaml for pictures in `FOLDER/my pictures` and a run in FOLDER/run; train: that section's keys."""
    pictures = folder / "my pictures"
    pictures.mkdir()
    random = np.random.default_rng(0)
    for number in range(PICTURES):
        Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text(f"{'red' if number % 2 else 'blue'} thing {number}")
    values = {
        "data": {"path": str(pictures), "resolution": 8},
        "text_encoder": {
            "class_path": "unet_attn.text_encoder.TextEncoder",
            "init_args": {"dim": 12, "depth": 1, "heads": 2},
        },
        "unet": {"in_channels": 1, "block_channels": [8, 16], "attention_levels": [1], "dim_head": 8},
        "tokenizer": {"vocab_size": 300, "max_length": 16},
        "scheduler": {"class_path": "diffusers.FlowMatchEulerDiscreteScheduler", "init_args": {}},
        "train": {"output_dir": str(folder / "run"), "batch_size": 4, "learning_rate": 0.01, **train},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
