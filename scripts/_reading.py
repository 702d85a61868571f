"""How a training's configuration reads its pictures and captions, for the scripts that read them as it does."""

from pathlib import Path
from typing import Any

from unet_attn.config_files import read_config

KEYS = ("caption_extension", "class_template", "text_column", "image_column", "split")
KEYS += ("background", "on_error", "max_pixels")


def section_of(config: Path, section: str) -> dict[str, Any]:
    """A section of a training's YAML file, as it stands there. Raises ValueError for what is no such file."""
    found = read_config(config)
    if section not in found:
        raise ValueError(f"{config} has no section {section}")
    return found[section]


def reading_options(data: dict[str, Any]) -> dict[str, Any]:
    """Those of a `data` section's options that say how a data set is read, whichever it is."""
    return {key: data[key] for key in KEYS if key in data}
