"""The model card of a run: README.md of the published pipeline, as Hugging Face shows it, from what the run recorded.

A card that a person wrote or changed is never touched: ours has the hash of its own text in its second line.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from unet_attn.checkpoint import write_whole
from unet_attn.faults import one_line, printable
from unet_attn.run_record import RunRecord, parameter_count, read_run
from unet_attn.scores import how_measured, score_rows

CARD = "README.md"
INDEX = "model_index.json"
# arguments of a call, and the keys of the pipeline's own in its index
_NUMBERS = {"num_inference_steps": "default_steps", "guidance_scale": "default_guidance_scale"}
# a comment of the front matter, so that nobody sees it on the page
_MARK = "# written by unet-attn, which replaces this file as long as nobody edits it: "
_MARKED = re.compile(rf"---\n{re.escape(_MARK)}([0-9a-f]{{64}})\n")


def write_model_card(run: Path) -> Path | None:
    """Write RUN/README.md and return its path; None if a README.md is there that a person wrote or changed.

    Raises ValueError for what is no run with a pipeline, OSError if a file cannot be read or written.
    """
    path = run / CARD
    if path.exists() and not _is_ours(path):
        return None
    write_whole(path, model_card(run))
    return path


def model_card(run: Path) -> str:
    """The card of a run whose pipeline is saved: Markdown with front matter. Raises as write_model_card."""
    record = read_run(run)
    if not (run / INDEX).is_file():
        raise ValueError(f"{run} holds no pipeline yet: training saves one with every checkpoint")
    sections = (
        _title(record),
        _usage(record),
        _training_data(record),
        _training(record),
        _scores(record),
        _limits(record),
        _reproduction(record),
    )
    body = _front_matter(record) + "\n" + "\n\n".join(filter(None, sections)) + "\n"
    return f"---\n{_MARK}{_hash(body)}\n{body}"


def _is_ours(path: Path) -> bool:
    try:
        card = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    mark = _MARKED.match(card)
    return mark is not None and mark[1] == _hash(card[mark.end() :])


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


# ---- the parts, from top to bottom


def _front_matter(record: RunRecord) -> str:
    """What the hub sorts models by. The licence is the publisher's to choose: none is invented here."""
    task = "text-to-image" if record.has_text else "unconditional-image-generation"
    tags = ["diffusers", "unet-attn", *([] if record.tuned_from else ["trained-from-scratch"])]
    listed = "".join(f"- {tag}\n" for tag in tags)
    return f"library_name: diffusers\npipeline_tag: {task}\ntags:\n{listed}---\n"


def _title(record: RunRecord) -> str:
    side, grey = record.setting("data", "resolution"), record.setting("unet", "in_channels") == 1
    pictures = f"{'grey ' if grey else ''}pictures" + (f" of {side} x {side} pixels" if side else "")
    wanted = f"Draws {pictures} from a caption." if record.has_text else f"Draws {pictures}, without a caption."
    parts = [f"the U-Net {count:,}" for count in [parameter_count(record.folder / "unet")] if count]
    if record.has_text and (count := parameter_count(record.folder / "text_encoder")):
        trained = "taken as it was, frozen" if _has_frozen_text(record) else "trained with it"
        parts.append(f"the text encoder, {trained}, {count:,}")
    weights = f" Parameters: {'; '.join(parts)}." if parts else ""
    start = record.tuned_from
    made = f"tuned from {_plain(start)} to draw in few steps," if start else "trained from scratch"
    return (
        f"# {_plain(record.name)}\n\n{wanted} A diffusion model {made} with unet-attn: a U-Net whose "
        f"low-resolution levels attend to themselves{' and to the words' if record.has_text else ''}.{weights}"
    )


def _usage(record: RunRecord) -> str:
    name = json.dumps(printable(record.name), ensure_ascii=False)
    prompts = record.setting("train", "sample_prompts")
    prompt = str(prompts[0]) if isinstance(prompts, list) and prompts else "a caption like those of the training data"
    prompt = json.dumps(one_line(printable(prompt)), ensure_ascii=False)
    call = (
        f"pipe({', '.join([prompt, *_own_numbers(record)])})"
        if record.has_text
        else f"pipe({', '.join(_own_numbers(record))})"
    )
    ours = (
        f"from unet_attn import TextToImagePipeline\n\npipe = TextToImagePipeline.from_pretrained({name})\n"
        f"image = {call}.images[0]"
    )
    stock = (
        "from diffusers import DiffusionPipeline\n\n"
        f"pipe = DiffusionPipeline.from_pretrained({name}, trust_remote_code=True)\nimage = {call}.images[0]"
    )
    return (
        "## How to use it\n\nThe name in quotes is this folder, or its repository. With unet-attn, which runs no code "
        f"of the folder:\n\n```python\n{ours}\n```\n\nWith diffusers, transformers and einops, by the code that the "
        f"folder carries:\n\n```python\n{stock}\n```"
    )


def _own_numbers(record: RunRecord) -> list[str]:
    """What a call takes that names no numbers, as it would name them; an older release saved none with the pipeline."""
    path = record.folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        saved = {name: index[key] for name, key in _NUMBERS.items() if key in index}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no index of a pipeline: {error}") from error
    for name, value in saved.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{path} has {_NUMBERS[name]} {value!r}, which is no number")
    return [f"{name}={value}" for name, value in saved.items()]


def _training_data(record: RunRecord) -> str:
    rows = [
        ("name", Path(record.data_path).name or "not recorded"),  # never the path: it is of the machine that trained
        ("pictures", f"{record.pictures:,}" if record.pictures else None),
        ("resolution", record.setting("data", "resolution")),
        ("share of captions dropped", record.setting("data", "caption_dropout") if record.has_text else None),
        ("share held out", record.setting("data", "validation_share") or None),
    ]
    return f"## Training data\n\n{_table(rows)}"


def _times(record: RunRecord) -> str | None:
    sampling, mean, deviation = (record.setting("objective", k) for k in ("time_sampling", "logit_mean", "logit_std"))
    return f"{sampling}, mean {mean}, deviation {deviation}" if sampling == "logit_normal" else sampling


def _training(record: RunRecord) -> str:
    seen, muon = record.metrics.last("pictures_seen"), record.setting("train", "optimizer") == "muon"
    rates = f", learning rate {record.setting('train', 'learning_rate')}"
    if muon:
        rates = f" {record.setting('train', 'muon_learning_rate')}, AdamW for the rest{rates}"
    optimizer = record.setting("train", "optimizer")
    rows = [
        ("tuned from", record.tuned_from),
        ("prediction", record.setting("objective", "prediction_type")),
        ("times", _times(record)),
        ("loss weighting", record.setting("objective", "loss_weighting")),
        ("scheduler", _class_name(record, "scheduler")),
        ("steps", f"{record.steps:,}" if record.steps else None),
        ("batch size", record.setting("train", "batch_size")),
        ("pictures seen", f"{seen:,.0f}" if seen else None),
        ("optimizer", f"{optimizer}{rates}" if optimizer else None),
        ("averaged weights (EMA)", record.setting("train", "ema_decay")),
        ("seed", record.setting("train", "seed")),
    ]
    return f"## Training\n\n{_table(rows)}\n\nThe weights here are the averaged ones."


def _scores(record: RunRecord) -> str | None:
    rows = score_rows(record.evaluation) if record.evaluation else []
    if not rows:
        return None
    lines = [f"| {_cell(row.name)} | {_cell(row.value)} | {_cell(row.tells)} |" for row in rows]
    head = "| measure | value ± standard error | what it tells |\n|---|---|---|"
    return "\n".join(["## Scores\n", head, *lines, "", f"{_plain(how_measured(record.evaluation))}"])


def _limits(record: RunRecord) -> str:
    side = record.setting("data", "resolution")
    what = "But for its text encoder it was" if _has_frozen_text(record) else "It was"
    start = record.tuned_from
    of = f"tuned from {_plain(start)} on the pictures above" if start else "trained from scratch on the pictures above"
    lines = [
        f"{what} {of} and nothing else: what they do not show it cannot draw.",
        f"It was trained at {side} x {side} pixels; other sizes are possible, and worse." if side else None,
    ]
    if record.has_text and not _has_frozen_text(record):
        lines.append(
            "Its words are those of the training captions: a prompt in another style or language means little to it."
        )
    lines += [
        "Whatever is one-sided or unwanted in the training pictures is in its pictures too; nothing was filtered, and "
        "pictures close to training pictures can come out.",
        "Rights in the training pictures may bear on what may be done with the model: no licence is stated here.",
    ]
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines if line)


def _reproduction(record: RunRecord) -> str:
    arguments = ["accelerate", "launch", "scripts/train.py", "--config", "config.yaml"]
    arguments += ["--data.path", "PICTURES", "--train.output_dir", "runs/again"]
    if record.tuned_from:
        arguments += ["--consistency.start", "START"]
    if record.setting("train", "resume") is not None:
        arguments += ["--train.resume", "null"]
    if record.setting("train", "max_steps") is None and record.steps:
        # the clock of another machine would end it elsewhere
        arguments += ["--train.max_minutes", "null", "--train.max_steps", str(record.steps)]
    start = ", and the model that it was tuned from in START" if record.tuned_from else ""
    return (
        "## How it was made\n\n`config.yaml` in this folder holds every setting. In a clone of unet-attn, with the "
        f"same pictures in the folder PICTURES{start}:\n\n```sh\n{shlex.join(arguments)}\n```"
    )


def _has_frozen_text(record: RunRecord) -> bool:
    return _class_name(record, "text_encoder") == "PretrainedText"


# ---- Markdown


def _class_name(record: RunRecord, section: str) -> str | None:
    """The last part of a section's class_path."""
    path = record.setting(section, "class_path")
    return str(path).rpartition(".")[2] if path else None


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    """Names and values, without those that are not known."""
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines])


def _cell(value: object) -> str:
    return _plain(value).replace("|", "\\|")


def _plain(value: object) -> str:
    """A value as text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_\[\]#])", r"\\\1", escape(one_line(printable(str(value))), quote=False))
