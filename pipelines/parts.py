"""The parts of a pipeline: what fits together, and how it is loaded, saved and shared."""

from enum import Enum
from os import PathLike
from pathlib import Path
from typing import TypeVar

import torch
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from torch import nn
from transformers import PreTrainedTokenizerBase

from unet_attn.pipelines.captions import check_tokenizer
from unet_attn.pipelines.inputs import check_count, check_guidance_scale
from unet_attn.pipelines.loading import check_format_version, forget_removed_shards, load_components
from unet_attn.pipelines.portable import check_portable, write_code_files
from unet_attn.schedulers import check_sampling_scheduler, declare_prediction_type, scheduler_prediction_type

FORMAT_VERSION = 1
DEFAULT_STEPS, DEFAULT_GUIDANCE_SCALE = 25, 3.0
DEFAULTS = ("default_steps", "default_guidance_scale")  # in the configuration; a folder may lack them
PARTS = ("unet", "scheduler", "text_encoder", "tokenizer", "guide_unet")

Pipeline = TypeVar("Pipeline", bound="PipelineOfParts")


class Own(Enum):
    """The default of a part that is not given, as None means that there shall be none."""

    PART = "the pipeline's own"


OWN = Own.PART


class PipelineOfParts(DiffusionPipeline):
    """A pipeline's parts: checked against each other, loaded, saved, and shared with another by `from_pipe`.

    unet: an AttnUNet2D; scheduler: a diffusers scheduler that fits the model's prediction type; text_encoder and
    tokenizer: both, or neither for an unconditional model; guide_unet: a weaker AttnUNet2D of the same pictures and
    text (smaller, or trained less), away from whose answer the guidance leads, in place of the unconditional one;
    prediction_type: what the U-Net predicts, by default what the scheduler says. It is kept in model_index.json, and a
    scheduler of another type is refused from then on.
    default_steps, default_guidance_scale: what a call takes that names no num_inference_steps, no guidance_scale. They
    are kept in model_index.json too.
    Raises ValueError if the parts do not fit each other, a weight stands in two places of what is trained, or a default
    is none that a call would take.
    """

    model_cpu_offload_seq = "text_encoder->unet->guide_unet"
    _optional_components = ["text_encoder", "tokenizer", "guide_unet"]  # noqa: RUF012  diffusers reads it from the class
    _callback_tensor_inputs = ["latents"]  # noqa: RUF012

    def __init__(
        self,
        unet: ModelMixin,
        scheduler: SchedulerMixin,
        text_encoder: ModelMixin | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        guide_unet: ModelMixin | None = None,
        prediction_type: str | None = None,
        format_version: int = FORMAT_VERSION,
        default_steps: int = DEFAULT_STEPS,
        default_guidance_scale: float = DEFAULT_GUIDANCE_SCALE,
    ) -> None:
        super().__init__()
        check_format_version(format_version, FORMAT_VERSION, "this pipeline")
        _check_parts(unet, scheduler, text_encoder, tokenizer, guide_unet)
        prediction_type = prediction_type or scheduler_prediction_type(scheduler)
        check_sampling_scheduler(scheduler, prediction_type)
        networks = [network for network in (unet, guide_unet) if network is not None]
        if prediction_type != "flow" and any(network.config.get("x_prediction", False) for network in networks):
            raise ValueError(f"a U-Net with x_prediction answers with a flow's velocity, not with {prediction_type}")
        # so that any class made from its config knows what the model predicts
        declare_prediction_type(scheduler, prediction_type)
        self.register_modules(
            unet=unet, scheduler=scheduler, text_encoder=text_encoder, tokenizer=tokenizer, guide_unet=guide_unet
        )
        self.register_to_config(
            prediction_type=prediction_type,
            format_version=format_version,
            **_checked_defaults(default_steps, default_guidance_scale),
        )

    @classmethod
    def from_pretrained(
        cls: type[Pipeline],
        pretrained_model_name_or_path: str | PathLike,
        *,
        dtype: str | torch.dtype | None = None,
        torch_dtype: str | torch.dtype | None = None,
        variant: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | PathLike | None = None,
        local_files_only: bool = False,
        unet: ModelMixin | Own = OWN,
        scheduler: SchedulerMixin | Own = OWN,
        text_encoder: ModelMixin | Own | None = OWN,
        tokenizer: PreTrainedTokenizerBase | Own | None = OWN,
        guide_unet: ModelMixin | Own | None = OWN,
    ) -> Pipeline:
        """Load a saved pipeline with the installed classes. Nothing in the folder is executed.

        pretrained_model_name_or_path: a folder, or the id of a repository on the hub; dtype (older name: torch_dtype):
        of all weights, by default float32; variant: of the weight files, as in `save_pretrained`; revision, token,
        cache_dir, local_files_only: for a repository, as huggingface_hub's `snapshot_download` takes them; unet,
        scheduler, text_encoder, tokenizer, guide_unet: used in place of the saved ones; with None there is none.
        Raises FileNotFoundError if it is no pipeline, and ValueError if weights are missing, left over or of a wrong
        shape, naming them: never does a model come back with random weights.
        """
        given = dict(zip(PARTS, (unet, scheduler, text_encoder, tokenizer, guide_unet), strict=True))
        components, options = load_components(
            pretrained_model_name_or_path,
            given={name: value for name, value in given.items() if value is not OWN},
            names=tuple(given),
            format_version=FORMAT_VERSION,
            dtype=dtype if dtype is not None else torch_dtype,
            variant=variant,
            hub={
                "revision": revision,
                "token": token,
                "cache_dir": cache_dir,
                "local_files_only": local_files_only,
            },
        )
        kept = {name: options[name] for name in ("prediction_type", "format_version", *DEFAULTS) if name in options}
        pipeline = cls(**components, **kept)
        pipeline.register_to_config(_name_or_path=str(pretrained_model_name_or_path))
        return pipeline

    @classmethod
    def from_pipe(
        cls: type[Pipeline],
        pipeline: "PipelineOfParts",
        *,
        unet: ModelMixin | Own = OWN,
        scheduler: SchedulerMixin | Own = OWN,
        text_encoder: ModelMixin | Own | None = OWN,
        tokenizer: PreTrainedTokenizerBase | Own | None = OWN,
        guide_unet: ModelMixin | Own | None = OWN,
    ) -> Pipeline:
        """Another kind of pipeline over the same parts, which are shared, not copied; parts given here replace its own.

        With guide_unet=None it has none, and so with the others.
        diffusers' own `from_pipe` would turn shared half-precision weights into float32; here they stay as they are.
        """
        given = dict(zip(PARTS, (unet, scheduler, text_encoder, tokenizer, guide_unet), strict=True))
        parts = {name: pipeline.components.get(name) if value is OWN else value for name, value in given.items()}
        # a pipeline whose class came with an older folder has no defaults
        kept = {name: pipeline.config[name] for name in ("prediction_type", *DEFAULTS) if name in pipeline.config}
        made = cls(**parts, **kept)
        if pipeline.config.get("_name_or_path") is not None:
            made.register_to_config(_name_or_path=pipeline.config["_name_or_path"])
        made.set_progress_bar_config(**getattr(pipeline, "_progress_bar_config", {}))
        return made

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        *,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str | None = None,
    ) -> None:
        """Save everything, with the code that loads it where unet-attn is not installed.

        `TextToImagePipeline.from_pretrained(dir)` reads the folder, and so does
        `DiffusionPipeline.from_pretrained(dir, trust_remote_code=True)`. To publish it use `push_to_hub(repo_id)`.
        Raises ValueError before anything is written if a part cannot be loaded elsewhere.
        """
        if not safe_serialization:
            raise ValueError("safe_serialization=False writes pickled weights, which are never loaded: leave it out")
        self.check_parts()
        # others may have been registered since
        self.register_to_config(**_checked_defaults(self.config.default_steps, self.config.default_guidance_scale))
        check_portable(self)
        # diffusers notes no class for a part that is set where there was none, and would save a folder without it
        self.register_modules(**self.components)
        super().save_pretrained(
            save_directory, safe_serialization=safe_serialization, variant=variant, max_shard_size=max_shard_size
        )
        for name in PARTS:
            forget_removed_shards(Path(save_directory) / name, variant)
        write_code_files(self, save_directory)

    def check_parts(self) -> None:
        """Refuse parts that were put in since for such as do not fit, with a ValueError."""
        _check_parts(**{name: self.components.get(name) for name in PARTS})
        check_sampling_scheduler(self.scheduler, self.config.prediction_type)


def check_unshared(**networks: nn.Module | None) -> None:
    """Refuse a weight that stands in two places: no file holds it twice, and of two files two weights would come back.

    networks: by the names that a message gives them. Raises ValueError naming both places.
    """
    places: dict[object, str] = {}
    for part, network in networks.items():
        for name, weight in () if network is None else network.named_parameters(remove_duplicate=False):
            place, found = f"{part}.{name}", _where(weight)
            if places.setdefault(found, place) != place:
                raise ValueError(
                    f"{places[found]} and {place} are one and the same weight, which cannot be saved and loaded "
                    "again: give each place its own, as copy.deepcopy makes it"
                )


def _where(weight: nn.Parameter) -> object:
    """What two parameters have in common that are one, or lie at one address; not all have an address."""
    plain = type(weight.data) is torch.Tensor and weight.device.type != "meta" and weight.numel()
    return (weight.device, weight.data_ptr()) if plain else id(weight)


def _checked_defaults(steps: int, guidance_scale: float) -> dict[str, int | float]:
    """Both, as plain numbers for the configuration. How many steps the schedule holds is for the call to check."""
    return {
        "default_steps": check_count("default_steps", steps),
        "default_guidance_scale": check_guidance_scale(guidance_scale, "default_guidance_scale"),
    }


def _check_network(name: str, network: nn.Module | None, kind: str, mark: str) -> None:
    """Refuse a network that has not what the pipeline asks it for, as others and those in a wrapper have not."""
    if network is None or hasattr(network, mark):  # torch.compile's wrapper passes on what is within
        return
    remedy = f": give accelerator.unwrap_model({name})" if hasattr(network, "module") else ""
    raise ValueError(f"{name} must be {kind}, got a {type(network).__name__}{remedy}")


def _check_parts(
    unet: ModelMixin,
    scheduler: SchedulerMixin,
    text_encoder: ModelMixin | None,
    tokenizer: PreTrainedTokenizerBase | None,
    guide_unet: ModelMixin | None,
) -> None:
    """Refuse parts that do not fit each other: their first call would fail deep inside."""
    for name, part in (("unet", unet), ("scheduler", scheduler)):
        if part is None:
            raise ValueError(f"a pipeline needs a {name}, got None")
    if not isinstance(scheduler, SchedulerMixin):
        raise ValueError(f"scheduler must be one of diffusers, got a {type(scheduler).__name__}")
    _check_network("unet", unet, "an AttnUNet2D", "downsample_factor")
    _check_network("guide_unet", guide_unet, "an AttnUNet2D", "downsample_factor")
    _check_network("text_encoder", text_encoder, "a TextEncoder or PretrainedText", "output_dim")
    ours, others = unet.config.get("in_channels"), unet.config.get("out_channels")
    if ours != others:
        raise ValueError(
            f"the U-Net of a pipeline must have as many out_channels as in_channels, got {others} and {ours}"
        )
    if (text_encoder is None) != (tokenizer is None):
        raise ValueError("text_encoder and tokenizer go together: give both, or neither for a model without text")
    if text_encoder is None and unet.config.get("context_dim") is not None:
        raise ValueError(
            f"the U-Net was trained with text (context_dim {unet.config.context_dim}): it needs a text_encoder and a "
            "tokenizer; for pictures without a caption give the empty prompt"
        )
    wanted = unet.config.get("context_dim")
    found = None if text_encoder is None else text_encoder.output_dim
    if wanted != found:
        raise ValueError(f"the U-Net has context_dim {wanted}, but the text encoder's output_dim is {found}")
    if tokenizer is not None:
        check_tokenizer(tokenizer, text_encoder)
    check_unshared(unet=unet, text_encoder=text_encoder)
    # what it shares with the U-Net is saved with both, and never trained
    check_unshared(guide_unet=guide_unet)
    if guide_unet is None:
        return
    for key in ("in_channels", "out_channels", "context_dim"):
        ours, others = unet.config.get(key), guide_unet.config.get(key)
        if ours != others:
            raise ValueError(f"guide_unet must have the U-Net's {key} {ours}, got {others}")
    if unet.downsample_factor % guide_unet.downsample_factor:
        raise ValueError(
            f"guide_unet has downsample_factor {guide_unet.downsample_factor}, which must divide the U-Net's "
            f"{unet.downsample_factor}"
        )
