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


def reading_options(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """Those of a `data` section's options that say how the data set at `path` is read, the section's own or another.

    A folder of pictures has no image_column, whatever the section's own data set has.
    """
    from unet_attn.data_options import DataOptions
    from unet_attn.tables import is_table

    found = {key: data[key] for key in KEYS if key in data}
    own = Path(str(data.get("path", ""))).resolve() == path.resolve()
    if not own and path.is_dir() and not is_table(DataOptions(path=str(path))):
        found.pop("image_column", None)
    return found
