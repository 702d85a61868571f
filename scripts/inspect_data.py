"""Look at a data set before training: what the model will see, and what is wrong with the files.

    python scripts/inspect_data.py DIR [--html report.html] [--config configs/icons.yaml] [--data.KEY VALUE ...]

Options are those of scripts/train.py that concern the pictures, the tokenizer and what the U-Net demands of them. With
its --config, everything is looked at as that run would see it. Nothing in
DIR is ever changed.

Exit codes: 0 training would start; 1 it would not, and the report says why; 2 the command line is wrong.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from _folder import check_file
from _inspection_report import as_html, as_json, as_text
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from transformers import AutoConfig, AutoTokenizer

from unet_attn.config_files import read_config
from unet_attn.data import DataOptions
from unet_attn.faults import printable
from unet_attn.inspection import MakeTokenizer, inspect
from unet_attn.options import TrainOptions
from unet_attn.pipelines.captions import position_limit
from unet_attn.pipelines.grid import picture_grid
from unet_attn.tokenizer import train_tokenizer

SHEET = 32  # pictures on the contact sheet
SHEET_COLUMNS = 8
REQUIRED = {"data": "path", "train": "output_dir"}  # of a configuration


def make_parser() -> ArgumentParser:
    """The part of train.py's command line that concerns data, without the libraries that the rest needs."""
    parser = ArgumentParser(prog="inspect_data.py", description=__doc__.split("\n\n")[0], exit_on_error=False)
    parser.add_argument("folder", nargs="?", metavar="DIR", help="the data set (default: data.path of --config)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a training's YAML file, for its options")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one page with pictures")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="write the contact sheet as a PNG")
    parser.add_argument("--without_text", action="store_true", help="for a model without text: captions do not matter")
    parser.add_class_arguments(DataOptions, "data", skip={"path"})
    parser.add_function_arguments(train_tokenizer, "tokenizer", skip={"captions"})
    parser.add_argument("--train.batch_size", type=int, default=64)
    parser.add_argument("--train.seed", type=int, default=0)
    parser.add_argument("--unet.in_channels", type=int, default=3)
    parser.add_argument("--unet.patch_size", type=int, default=1)
    parser.add_argument("--unet.block_channels", type=tuple[int, ...], default=(32, 64, 128))
    return parser


def take_config(parser: ArgumentParser, path: Path) -> dict[str, Any]:
    """Make the options of a training's YAML file the parser's defaults. Returns its sections, as training reads them.

    Raises ValueError if it is no such file or holds what training would refuse.
    """
    from train import expand_homes, make_parser  # seconds of imports, for a file alone

    config = read_config(path)
    # what training must be told, and this file may leave to its command line
    whole = {section: {key: ""} | config.get(section, {}) for section, key in REQUIRED.items()}
    try:
        read = expand_homes(make_parser().parse_object(config | whole))
    except ArgumentError as error:
        raise ValueError(f"{path}: {error}") from None
    known = [name for name in vars(parser.get_defaults().as_flat()) if "." in name]
    parser.set_defaults({name: read[name] for name in known})
    return {section: values for section, values in read.as_dict().items() if section in config}


def tokenizer_maker(options: Namespace, config: dict[str, Any]) -> MakeTokenizer | None:
    """As training makes its tokenizer; None for a model without text."""
    text_encoder = config.get("text_encoder", {})
    if options.without_text or text_encoder is None:
        return None
    if text_encoder.get("class_path", "").endswith(".PretrainedText"):
        path = text_encoder["init_args"]["path"]
        held = position_limit(AutoConfig.from_pretrained(path).to_dict()) or options.tokenizer.max_length
        limit = min(options.tokenizer.max_length, held)
        return lambda captions: AutoTokenizer.from_pretrained(path, model_max_length=limit)
    return lambda captions: train_tokenizer(captions, **options.tokenizer.as_dict())


def check_places(options: Namespace, data: Path) -> None:
    """Refuse what --html and --sheet cannot be, before the minutes that a look at many files may take."""
    if options.html is not None:
        check_file(options.html, "--html")
    if options.sheet is not None:
        check_file(options.sheet, "--sheet")
        if options.sheet.suffix.lower() != ".png":
            raise ValueError(f"--sheet {options.sheet}: the contact sheet is a PNG, so its name must end in .png")
        if data.is_dir() and options.sheet.resolve().is_relative_to(data.resolve()):
            raise ValueError(f"--sheet {options.sheet} lies in the data folder, where it would be trained on")


def say(text: str) -> None:
    """Print; a reader who has seen enough, as `head` has, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # what is still in the buffer would fail again when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: list[str] | None) -> int:
    parser = make_parser()
    config: dict[str, Any] = {}
    first = parser.parse_args(arguments)
    if first.config is not None:
        config = take_config(parser, first.config)
    options = parser.parse_args(arguments)
    TrainOptions(output_dir=".", max_steps=1, **options.train.as_dict())
    if not options.unet.block_channels or options.unet.patch_size < 1:
        got = f"{list(options.unet.block_channels)} and {options.unet.patch_size}"
        raise ValueError(f"unet.block_channels needs a level at least and unet.patch_size to be 1 at least, got {got}")
    path = options.folder or config.get("data", {}).get("path")
    if not path:
        raise ValueError("which data set? Give DIR, or a --config with data.path")
    data = DataOptions(path=str(path), **options.data.as_dict())
    if data.streaming:
        raise ValueError("a streamed data set cannot be inspected whole: inspect it without data.streaming")
    check_places(options, Path(path))
    found = inspect(
        data,
        channels=options.unet.in_channels,
        seed=options.train.seed,
        batch_size=options.train.batch_size,
        multiple_of=options.unet.patch_size * 2 ** (len(options.unet.block_channels) - 1),
        make_tokenizer=tokenizer_maker(options, config),
        sheet_size=SHEET,
    )
    say(printable(json.dumps(as_json(found), indent=1)) if options.json else as_text(found))
    if options.html is not None:
        options.html.write_text(as_html(found), encoding="utf-8")
    if options.sheet is not None and found.sheet:
        pictures, captions = zip(*found.sheet, strict=True)
        picture_grid(list(pictures), list(captions), SHEET_COLUMNS).save(options.sheet, optimize=True)
    return 1 if found.problems else 0


def main(arguments: list[str] | None = None) -> int:
    # of damaged EXIF data, without saying of which file; faults are told by the report
    warnings.filterwarnings("ignore", module="PIL")
    try:
        return run(arguments)
    except (ArgumentError, ValueError, OSError) as error:
        print(f"error: {' '.join(printable(str(error)).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
