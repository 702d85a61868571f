"""YAML files as people write them: a training's configuration, a run's, an experiment's."""

from pathlib import Path
from typing import Any

import yaml

SECTIONS = ("data", "unet", "objective", "train", "tokenizer")  # of a configuration; others may be null or a class


def read_yaml(path: Path, wanted: str = f"sections such as {', '.join(SECTIONS)}") -> dict[str, Any]:
    """The keys of a file. Raises ValueError, naming it, for what is no YAML or has no keys; OSError if unreadable.

    wanted: what keys it should have, for the message.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must have {wanted}")
    return found


def read_config(path: Path) -> dict[str, Any]:
    """A training's configuration, whole or in part. Raises ValueError as read_yaml, and for a section without keys."""
    found = read_yaml(path)
    for name in SECTIONS:
        if not isinstance(found.get(name, {}), dict):
            raise ValueError(f"{path}: {name} must be a section with keys of its own, got {found[name]!r}")
    return found
