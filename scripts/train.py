"""Train a text-to-image diffusion model from scratch.

    accelerate launch scripts/train.py --config configs/icons.yaml [--SECTION.KEY VALUE ...]

Every key of the configuration can be given on the command line too, for example --train.max_minutes 5; --help lists
them and --print_config shows what a run would use. How many processes and which precision is for `accelerate launch`.

Exit codes: 0 the run is complete; 2 the start was refused or the run failed, with a message; 75 a signal ended the run
after a checkpoint was saved, so that --train.resume latest goes on.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration
from diffusers import SchedulerMixin
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from unet_attn.checkpoint import load_state
from unet_attn.consistency import ConsistencyOptions, ConsistencyTuning
from unet_attn.data import CaptionedImages, DataError, DataOptions, StreamedImages, open_data
from unet_attn.divergence import TrainingDiverged
from unet_attn.inspection import describe_captions, some_captions
from unet_attn.loss_weights import NoiseUncertainty
from unet_attn.model import TextConditionalUNet
from unet_attn.model_card import write_model_card
from unet_attn.objective import Objective
from unet_attn.options import TrainOptions, check_config_files, check_start, check_unchanged, fixed_settings
from unet_attn.pipelines.captions import caption_limit
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.processes import LONGEST_WAIT, Processes
from unet_attn.report import write_report
from unet_attn.schedulers import unknown_value
from unet_attn.text_encoder import PretrainedText, TextEncoder
from unet_attn.tokenizer import train_tokenizer
from unet_attn.tracking import check_trackers
from unet_attn.training import Trainer
from unet_attn.unet import AttnUNet2D

PATHS = ("data.path", "train.output_dir", "train.resume", "consistency.start", "text_encoder.init_args.path")
INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later
TWO_ON_CPU = "accelerate launch --multi_gpu --num_processes 2 scripts/train.py ..., without --cpu"


def make_parser() -> ArgumentParser:
    """The command line: the constructors' own parameters, less those that follow from others (see `build`)."""
    parser = ArgumentParser(prog="train.py", description=__doc__.split("\n\n")[0], exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile, help="a YAML file; later options override it")
    parser.add_class_arguments(DataOptions, "data")
    parser.add_subclass_arguments(
        (TextEncoder, PretrainedText),
        "text_encoder",
        skip={"vocab_size", "max_length", "model_config", "format_version"},
        required=False,
        help="TextEncoder, PretrainedText, or null for a model without text",
    )
    parser.add_class_arguments(
        AttnUNet2D, "unet", skip={"sample_size", "out_channels", "context_dim", "x_prediction", "format_version"}
    )
    parser.add_function_arguments(train_tokenizer, "tokenizer", skip={"captions"})
    parser.add_subclass_arguments(SchedulerMixin, "scheduler", skip={"prediction_type"})
    parser.add_class_arguments(Objective, "objective", skip={"scheduler"})
    parser.add_class_arguments(ConsistencyOptions, "consistency")
    parser.add_class_arguments(TrainOptions, "train")
    return parser


def expand_homes(config: Namespace) -> Namespace:
    """Put the home folder in the place of `~` in all paths: a shell leaves that of --KEY=~/x alone, as YAML does."""
    for key in PATHS:
        if isinstance(path := config.get(key), str):
            config[key] = os.path.expanduser(path)  # which, unlike Path, leaves all else as it is
    return config


def make_accelerator(output_dir: str, trackers: Sequence[str] = ()) -> Accelerator:
    """The processes as `accelerate launch` started them, on the CPU where there is no accelerator.

    trackers: where metrics go besides the run's own file, by Accelerate's names.

    Raises ValueError for a launch that would silently run otherwise than it was asked to.
    """
    environment = os.environ
    on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() == "true" or not torch.accelerator.is_available()
    if environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        if on_cpu:
            raise ValueError(
                "FSDP is not supported on a CPU, where Accelerate would silently run DDP: launch without --use_fsdp"
            )
        if environment.get("FSDP_VERSION") != "2":
            raise ValueError("of FSDP only version 2 is supported: launch with configs/accelerate/fsdp2.yaml")
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        raise ValueError("DeepSpeed is not supported: launch without --use_deepspeed")
    if int(environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")) != 1:
        raise ValueError("set train.gradient_accumulation_steps rather than accelerate's --gradient_accumulation_steps")
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise ValueError("set train.compile rather than accelerate's --dynamo_backend")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if on_cpu and precision == "fp16":
        raise ValueError("mixed precision fp16 needs a GPU: launch with --mixed_precision bf16 or no")
    if not on_cpu and precision == "bf16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise ValueError("this GPU has no bf16: launch with --mixed_precision fp16 or no")
    # the launcher leaves the address of a rendezvous, yet starts one process, which then is alone
    if on_cpu and "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment:
        raise ValueError(f"accelerate launch --cpu starts one process whatever was asked for: use {TWO_ON_CPU}")

    accelerator = Accelerator(
        cpu=on_cpu,
        log_with=list(trackers) or None,
        project_config=ProjectConfiguration(project_dir=output_dir, logging_dir=str(Path(output_dir, "logs"))),
        # the others wait for the main process while it reads every picture for the first time
        kwargs_handlers=[InitProcessGroupKwargs(timeout=LONGEST_WAIT)],
    )
    launched = int(environment.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise ValueError(
            f"{launched} processes were launched, but Accelerate sees {accelerator.num_processes}, so each would train "
            f"alone: use {TWO_ON_CPU}"
        )
    return accelerator


def class_of(spec: Namespace) -> type:
    module, _, name = spec.class_path.rpartition(".")
    return getattr(import_module(module), name)


def make(spec: Namespace, **more: Any) -> Any:
    """Build what a class_path and its init_args describe, with `more` parameters that follow from elsewhere."""
    return class_of(spec)(**spec.init_args.as_dict(), **more)


def make_scheduler(spec: Namespace | None) -> SchedulerMixin:
    """The scheduler of a configuration. Raises ValueError, naming the setting, where diffusers' class can make none."""
    if spec is None:
        raise ValueError("scheduler must have a class_path, as diffusers.FlowMatchEulerDiscreteScheduler, got null")
    settings, times = spec.init_args.as_dict(), "num_train_timesteps"
    if times in settings and not (settings[times] and settings[times] > 0):
        raise ValueError(f"scheduler.init_args.{times} must be at least 1, got {settings[times]}")
    try:
        return make(spec)
    except NotImplementedError as error:
        fault = unknown_value(spec.class_path.rpartition(".")[2], settings, error)
        raise ValueError(f"scheduler.init_args: {fault}") from None
    except Exception as error:  # diffusers checks little and computes with what it is given, so anything may fail
        usual = signature(class_of(spec)).parameters
        changed = {key: value for key, value in settings.items() if value != usual[key].default}
        told = str(error).partition("\n")[0]
        raise ValueError(f"scheduler.init_args {changed} make no {spec.class_path}: {told}") from error


class Built(NamedTuple):
    """What a configuration describes."""

    model: TextConditionalUNet
    objective: Objective
    data: CaptionedImages | StreamedImages
    tuning: ConsistencyTuning | None


def build(config: Namespace, options: TrainOptions, resume_from: Path | None) -> Built:
    """Build what a run needs. What one section knows another is told here, never by the user twice.

    Everything that can be wrong without data is built before it is read.
    """
    data_options = DataOptions(**config.data.as_dict())
    objective = Objective(make_scheduler(config.scheduler), **config.objective.as_dict())
    tuning = make_tuning(config.consistency, objective)
    has_text = config.text_encoder is not None
    options.check_prompts(has_text=has_text)
    pretrained = has_text and config.text_encoder.class_path.endswith(".PretrainedText")
    text_encoder = make(config.text_encoder) if pretrained else None
    context_dim = None
    if has_text:
        if not pretrained:  # with no captions yet: whatever else is wrong with the two comes out now
            tokenizer = train_tokenizer([], **config.tokenizer.as_dict())
            make(config.text_encoder, vocab_size=len(tokenizer), max_length=config.tokenizer.max_length)
        context_dim = text_encoder.output_dim if pretrained else config.text_encoder.init_args.dim

    torch.manual_seed(options.seed)
    unet = AttnUNet2D(
        **config.unet.as_dict(),
        out_channels=config.unet.in_channels,
        sample_size=config.data.resolution,
        context_dim=context_dim,
        x_prediction=objective.x_prediction,
    )
    if resume_from is not None:
        tuned = {} if tuning is None else tuning.settings
        share = data_options.validation_share
        check_resumed(resume_from, fixed_settings(options, unet, None, objective, validation_share=share, tuning=tuned))
    model = None
    if tuning is not None:
        check_tokenizer(tuning, config.tokenizer, pretrained=pretrained)
        model = assembled(config, options, unet, text_encoder, tuning.start.tokenizer, objective)
        tuning.begin_with(model)
    data = open_data(
        data_options,
        channels=config.unet.in_channels,
        seed=options.seed,
        require_captions=has_text,
        multiple_of=unet.downsample_factor,
    )

    if model is None:
        tokenizer = make_tokenizer(config, data, resume_from, pretrained=pretrained) if has_text else None
        model = assembled(config, options, unet, text_encoder, tokenizer, objective)
    return Built(model, objective, data, tuning)


def check_resumed(resume_from: Path, now: dict[str, Any]) -> None:
    """Refuse a checkpoint of other settings; the text encoder's follow from the captions, which are not read yet."""
    then_and_now = (load_state(resume_from)["fixed"], now)
    then, now = ({key: each[key] for key in each if not key.startswith("text_encoder")} for each in then_and_now)
    check_unchanged(resume_from, then, now)


def assembled(
    config: Namespace,
    options: TrainOptions,
    unet: AttnUNet2D,
    text_encoder: nn.Module | None,
    tokenizer: PreTrainedTokenizerFast | None,
    objective: Objective,
) -> TextConditionalUNet:
    """What is trained. text_encoder: a pretrained one; otherwise one is made for the tokenizer, where there is one."""
    if tokenizer is not None and text_encoder is None and config.text_encoder is not None:
        torch.manual_seed(options.seed + 1)
        text_encoder = make(config.text_encoder, vocab_size=len(tokenizer), max_length=config.tokenizer.max_length)
    uncertainty = NoiseUncertainty() if objective.loss_weighting == "uncertainty" else None
    return TextConditionalUNet(unet, text_encoder, tokenizer, uncertainty)


def make_tuning(section: Namespace | None, objective: Objective) -> ConsistencyTuning | None:
    """What tunes the run or saved pipeline that the section names; None where it names none."""
    options = ConsistencyOptions(**({} if section is None else section.as_dict()))  # null in earlier configurations
    if options.start is None:
        if options != ConsistencyOptions():
            raise ValueError("consistency.start must name what is tuned, a run or a saved pipeline")
        return None
    try:
        start = TextToImagePipeline.from_pretrained(options.start)
    except (ValueError, OSError) as error:
        raise ValueError(f"consistency.start {options.start} cannot be used: {error}") from error
    return ConsistencyTuning(options, start, objective)


def check_tokenizer(tuning: ConsistencyTuning, section: Namespace, *, pretrained: bool) -> None:
    """Refuse settings that are not those of the start's tokenizer, which is taken as it is."""
    tokenizer, name = tuning.start.tokenizer, f"consistency.start {tuning.options.start}"
    if tokenizer is None:
        return
    if not pretrained and len(tokenizer) > section.vocab_size:
        raise ValueError(f"{name} has {len(tokenizer)} tokens: tokenizer.vocab_size {section.vocab_size} is fewer")
    if tokenizer.model_max_length != section.max_length:
        limit = tokenizer.model_max_length
        raise ValueError(f"{name} has tokenizer.max_length {limit}, not {section.max_length}: set it to that")


def check_output_outside(output_dir: str, data_path: str) -> None:
    """Refuse a run folder among the pictures: its sample grids would be trained on by the next run."""
    if Path(output_dir).resolve().is_relative_to(Path(data_path).resolve()):
        raise ValueError(f"train.output_dir {output_dir} lies in data.path {data_path}: choose a folder outside it")


def in_turn(processes: Processes, make: Callable[[], Any]) -> Any:
    """Make something in the main process and then in the others, which find the checked pictures in the cache.

    An error in one is raised in all: a process that dies alone leaves the others waiting for it.
    """
    made = processes.each(lambda: make() if processes.is_main else None)
    return processes.each(lambda: made if processes.is_main else make())


def make_tokenizer(
    config: Namespace, data: CaptionedImages | StreamedImages, resume_from: Path | None, *, pretrained: bool
) -> PreTrainedTokenizerFast:
    """The checkpoint's tokenizer, since captions may have changed; the pretrained text model's; or a new one."""
    if resume_from is not None:
        kind = AutoTokenizer if pretrained else PreTrainedTokenizerFast  # a text model's may have no tokenizer.json
        return kind.from_pretrained(resume_from / "tokenizer")
    if pretrained:
        path = config.text_encoder.init_args.path
        tokenizer = AutoTokenizer.from_pretrained(
            path, model_max_length=config.tokenizer.max_length, truncation_side="right"
        )
        if tokenizer.pad_token is None:  # of GPT-2 and its like; whatever fills a batch up is masked
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer
    captions = (caption for variants in data.captions for caption in variants)
    return train_tokenizer(captions, **config.tokenizer.as_dict())


def describe(accelerator: Accelerator) -> str:
    """The first line of a run."""
    count = accelerator.num_processes
    precision = "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    return f"training on {count} process{'es' if count > 1 else ''}, {accelerator.device.type}, {precision}"


def describe_model(model: nn.Module) -> str:
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    return f"{trained:,} parameters to train" + (f", {frozen:,} frozen" if frozen else "")


def describe_run(folder: Path) -> None:
    """Write the report and the model card. The run is complete by then, whatever comes of them."""
    try:
        write_model_card(folder)
        print(f"report: {write_report(folder)}")
    except (ValueError, OSError) as error:
        print(f"warning: the report was not written: {error}", file=sys.stderr)


def train(arguments: list[str] | None) -> int:
    """Parse, build, train. Returns the exit code."""
    check_config_files(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    config = expand_homes(parser.parse_args(arguments))
    options = TrainOptions(**config.train.as_dict())
    check_trackers(options.trackers)
    accelerator = make_accelerator(options.output_dir, options.trackers)
    accelerator.print(describe(accelerator))
    check_output_outside(options.output_dir, config.data.path)
    processes = Processes("train.py")
    resume_from = processes.each(lambda: check_start(options, num_processes=processes.count))

    built = in_turn(processes, lambda: build(config, options, resume_from))
    model, data = built.model, built.data
    accelerator.print(data.summary())
    if model.tokenizer is not None:
        limit = caption_limit(model.tokenizer, model.text_encoder)
        if cut := describe_captions(data.captions, model.tokenizer, limit=limit).cut:
            why = "tokenizer.max_length" if limit == model.tokenizer.model_max_length else "what the text model holds"
            accelerator.print(f"{cut} captions are longer than {limit} tokens and lose their ends ({why})")
    accelerator.print(describe_model(model))
    if options.sample_prompts is None:
        prompts = () if model.tokenizer is None else some_captions(data.captions)
        options = replace(options, sample_prompts=prompts)
        config.train.sample_prompts = prompts
    text = parser.dump(config, skip_unset=False)
    trainer = Trainer(
        model, built.objective, data, options, accelerator, config=text, resume_from=resume_from, tuning=built.tuning
    )
    try:
        finished = trainer.run()
    except (ValueError, OSError) as error:
        if not accelerator.is_local_main_process and not isinstance(error, TrainingDiverged):  # which all notice
            print(f"error: process {accelerator.process_index}: {' '.join(str(error).split())}", file=sys.stderr)
        raise
    if accelerator.is_main_process:
        describe_run(Path(options.output_dir))
    if finished:
        accelerator.print(f"trained {trainer.step} steps; the pipeline is in {options.output_dir}")
        return 0
    accelerator.print(f"stopped by a signal after step {trainer.step}; go on with --train.resume latest")
    return INTERRUPTED


def main(arguments: list[str] | None = None) -> int:
    try:
        return train(arguments)
    except (ArgumentError, ValueError, OSError) as error:
        # once on each machine, which may be the only one to fail; -1 is that of a process that was not launched
        if int(os.environ.get("LOCAL_RANK", "-1")) <= 0:
            # what is wrong with data is a list of files, a line each
            print(f"error: {error if isinstance(error, DataError) else ' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        remedy = "raise train.gradient_accumulation_steps, or lower what docs/training.md names (Too slow, too large)"
        print(f"error: {str(error).split('. ')[0]}: {remedy}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
