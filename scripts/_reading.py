"""How a training's configuration reads its pictures and captions, for the scripts that read them as it does."""

from pathlib import Path
from typing import Any

KEYS = ("caption_extension", "class_template", "text_column", "image_column", "split")
KEYS += ("background", "on_error", "max_pixels")


def section_of(config: Path, section: str) -> dict[str, Any]:
    """A section of a training's YAML file, as it stands there. Raises ValueError for what is no such file."""
    import yaml

    try:
        found = yaml.safe_load(config.read_text(encoding="utf-8"))[section]
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{config} is no configuration of a training: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{config}: {section} must be a section with keys of its own, got {found!r}")
    return found


def reading_options(data: dict[str, Any]) -> dict[str, Any]:
    """Those of a `data` section's options that say how a data set is read, whichever it is."""
    return {key: data[key] for key in KEYS if key in data}
