"""Strict loading of what was saved: no code of the folder is run, and no weight is left random.

diffusers' own loader only warns about weights that are missing or left over, and about configuration keys that it does
not know. Here each of these is an error that names them.
"""

import json
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import TypeVar

import diffusers
import torch
import transformers
from diffusers import ModelMixin, SchedulerMixin
from diffusers.utils import logging
from transformers import PreTrainedTokenizerBase

from unet_attn.schedulers import scheduler_from_config
from unet_attn.strict_loading import parse_dtype, some_keys

INDEX_NAME = "model_index.json"
# a class by the name in a saved config. Looked up by name, so that a saved folder's copy of this file stands alone.
MODEL_MODULES = {
    "AttnUNet2D": "unet_attn.unet",
    "TextEncoder": "unet_attn.text_encoder",
    "PretrainedText": "unet_attn.text_encoder",
}

Model = TypeVar("Model", bound=ModelMixin)


def load_components(
    path: str | PathLike,
    *,
    names: tuple[str, ...],
    given: dict[str, object],
    format_version: int,
    dtype: str | torch.dtype | None = None,
    variant: str | None = None,
    hub: dict[str, object] | None = None,
) -> tuple[dict[str, object], dict[str, object]]:
    """The parts of a saved pipeline by name, and the plain values of its index.

    path: a folder, or a repository's id on the hub; names: the parts wanted; given: parts that are taken as they are;
    format_version: the one that is read; hub: for huggingface_hub's `snapshot_download`.
    Raises FileNotFoundError if path is no pipeline and ValueError if a part cannot be loaded exactly as it was saved.
    """
    folder = _local_folder(path, hub or {})
    index = _read_json(folder / INDEX_NAME)
    # before the parts, which a later release may have laid out otherwise
    check_format_version(index.get("format_version", format_version), format_version, folder / INDEX_NAME)
    dtype = parse_dtype(dtype)
    components = {}
    for name in names:
        entry = index.get(name)
        if name in given:
            components[name] = given[name]
        elif entry is None or entry == [None, None]:
            components[name] = None
        elif not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(each, str) for each in entry):
            raise ValueError(f"{folder / INDEX_NAME} must name {name} as [library, class], got {entry!r}")
        else:
            components[name] = _load_part(folder / name, entry[1], dtype=dtype, variant=variant)
    if any(components.get(name) is None and name not in given for name in ("unet", "scheduler")):
        raise ValueError(f"{folder / INDEX_NAME} names no unet and scheduler: it is not a pipeline of unet-attn")
    return components, {name: value for name, value in index.items() if name not in components}


def load_component(
    cls: type[Model],
    directory: str | PathLike,
    *,
    dtype: str | torch.dtype | None = None,
    variant: str | None = None,
) -> Model:
    """Load one of our models from its folder, exactly.

    cls: the class that the folder's config.json names; dtype: of the weights, float32 by default; variant: of the
    weight file, as in `diffusion_pytorch_model.VARIANT.safetensors`.
    Raises FileNotFoundError for missing files and ValueError, naming the keys, if config or weights are another's.
    """
    directory = Path(directory)
    config = _read_json(directory / cls.config_name)
    _check_config(config, cls, directory / cls.config_name)
    _check_weight_file(directory, variant)
    options = {} if dtype is None else {"torch_dtype": parse_dtype(dtype)}
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # what it warns of is an error below, in one line
    try:
        # without low_cpu_mem_usage: buffers that are not saved must be made
        model = cls.from_pretrained(
            directory,
            variant=variant,
            low_cpu_mem_usage=False,
            use_safetensors=True,
            local_files_only=True,
            **options,
        )
        # of a file of several dtypes each weight would keep its own
        return model.to(options.get("torch_dtype", torch.float32))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"the weights in {directory} cannot be read: {_one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)


def check_format_version(found: int, known: int, where: str | PathLike) -> None:
    """Refuse what a later release saved, rather than read it wrongly."""
    if found != known:
        raise ValueError(
            f"{where} has format_version {found}, this release of unet-attn reads format_version {known}: "
            f"install a release that reads {found}"
        )


def _load_part(
    directory: Path, class_name: str, *, dtype: torch.dtype | None, variant: str | None
) -> ModelMixin | SchedulerMixin | PreTrainedTokenizerBase:
    """A part by the class its index entry names: ours, a scheduler of diffusers, or a tokenizer of transformers."""
    if class_name in MODEL_MODULES:
        return load_component(_model_class(class_name), directory, dtype=dtype, variant=variant)
    found = getattr(diffusers, class_name, None) if class_name.endswith("Scheduler") else None
    if isinstance(found, type) and issubclass(found, SchedulerMixin):
        config = _read_json(directory / found.config_name)
        return _naming(directory, lambda: scheduler_from_config(found, config))
    found = getattr(transformers, class_name, None)
    if isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase):
        return _naming(directory, lambda: found.from_pretrained(directory, local_files_only=True))
    raise ValueError(f"{directory} holds a {class_name}, which is no part that unet-attn knows")


def _model_class(name: str) -> type[ModelMixin]:
    try:
        return getattr(import_module(MODEL_MODULES[name]), name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{name} needs unet-attn installed; without it, load with "
            "diffusers.DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)"
        ) from error


def _local_folder(path: str | PathLike, hub: dict[str, object]) -> Path:
    """The folder of a pipeline; one on the hub is fetched, its weights and configuration only."""
    folder = Path(path)
    if not folder.is_dir():
        if folder.exists() or str(path).count("/") != 1 or str(path).startswith((".", "/")):
            raise FileNotFoundError(f"{path} is no folder")
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.txt"], **hub))
        except (OSError, ValueError) as error:
            raise FileNotFoundError(f"{path} is no folder, and the hub did not give it: {_one_line(error)}") from error
    if not (folder / INDEX_NAME).is_file():
        raise FileNotFoundError(f"{path} is no saved pipeline: it has no {INDEX_NAME}")
    return folder


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(content).__name__}")
    return content


def _check_config(config: dict, cls: type[ModelMixin], path: Path) -> None:
    parameters = signature(cls.__init__).parameters
    if config.get("_class_name") != cls.__name__:
        raise ValueError(f"{path} is of a {config.get('_class_name')}, not of a {cls.__name__}")
    if "format_version" in parameters and "format_version" in config:
        check_format_version(config["format_version"], parameters["format_version"].default, path)
    unknown = [key for key in config if key not in parameters and not key.startswith("_")]
    if unknown:
        raise ValueError(f"{path} has keys that {cls.__name__} does not know: {some_keys(unknown)}")


def forget_removed_shards(directory: Path, variant: str | None) -> None:
    """Remove the index that an earlier save in shards left: diffusers removes the shards, and then looks for them."""
    single, sharded = _weight_files(variant)
    if not any(directory.glob(f"{single.removesuffix('.safetensors')}-*-of-*.safetensors")):
        (directory / sharded).unlink(missing_ok=True)


def _weight_files(variant: str | None) -> tuple[str, str]:
    """The names of the one weight file, and of the index that stands for several."""
    middle = "" if variant is None else f".{variant}"
    return f"diffusion_pytorch_model{middle}.safetensors", f"diffusion_pytorch_model.safetensors.index{middle}.json"


def _check_weight_file(directory: Path, variant: str | None) -> None:
    """diffusers takes another file, or only logs, where the one asked for is missing."""
    single, sharded = _weight_files(variant)
    if not (directory / single).is_file() and not (directory / sharded).is_file():
        asked = "" if variant is None else f" for variant={variant!r}"
        raise FileNotFoundError(f"{directory} has no weights{asked}: {single} is missing")


def _naming(directory: Path, load: Callable[[], object]) -> object:
    """Run a loader of another library so that its failure names the folder in one line."""
    try:
        return load()
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(f"{directory} cannot be loaded: {_one_line(error)}") from error


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
