"""The code files of a saved pipeline, by which stock diffusers loads it where unet-attn is not installed.

Beside each part of ours stand two files, named in model_index.json by the first:

    unet_attn_unet_HASH.py        the shim: takes the installed class, or else the copy in
    unet_attn_unet_HASH_code.py   the bundle: our modules that the class needs, merged into one file

diffusers copies the files of every pipeline of a process into one folder and keeps modules by their names, so that two
checkpoints with different code would mix: HASH is of the content, and different code has another name. A class that
was itself loaded from a bundle is saved by copying its file.
"""

import ast
import hashlib
import json
import os
import re
import sys
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from diffusers import DiffusionPipeline

PACKAGE = "unet_attn"
PIPELINE_INDEX = "model_index.json"
ORIGIN = "BUNDLED_FROM"  # the name in a bundle that says which module it stands for
STOCK_LIBRARIES = ("diffusers", "transformers")


class CodeFiles(NamedTuple):
    """The two files of one class: their stems and texts."""

    shim_name: str
    shim: str
    bundle_name: str
    bundle: str


def check_portable(pipeline: DiffusionPipeline) -> None:
    """Refuse a pipeline with a part that no other program could load, as its class is not in a library."""
    for name, part in {"the pipeline": pipeline, **pipeline.components}.items():
        cls = _class_of(part)
        if part is not None and not _is_ours(cls) and cls.__module__.split(".")[0] not in STOCK_LIBRARIES:
            raise ValueError(
                f"{name} is a {cls.__name__} of the module {cls.__module__}, which a saved pipeline cannot carry: "
                f"save its weights yourself, or use a class of {PACKAGE}, diffusers or transformers"
            )


def write_code_files(pipeline: DiffusionPipeline, directory: str | PathLike) -> None:
    """Write the code files into a folder that `DiffusionPipeline.save_pretrained` wrote, and name them in its index."""
    directory = Path(directory)
    index = json.loads((directory / PIPELINE_INDEX).read_text(encoding="utf-8"))
    index.pop("_name_or_path", None)  # a path of this machine
    index["_class_name"] = [_write(directory, code_files(type(pipeline))), type(pipeline).__name__]
    for name, part in pipeline.components.items():
        cls = _class_of(part)
        if _is_ours(cls):
            index[name] = [_write(directory / name, code_files(cls)), cls.__name__]
        elif part is not None and index[name][1] == "TokenizersBackend":
            # transformers 5 calls it so, 4 does not know that name, both know this one
            index[name] = ["transformers", "PreTrainedTokenizerFast"]
        _forget_origin(directory / name / "config.json")
    text = json.dumps(index, indent=2) + "\n"
    _replace(directory / PIPELINE_INDEX, text)


def _forget_origin(path: Path) -> None:
    """Take out of a part's config where it was loaded from: a path of this machine."""
    if not path.exists():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.pop("_name_or_path", None) is not None:
        _replace(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def code_files(cls: type) -> CodeFiles:
    """The shim and the bundle of one of our classes, or of a class that came from a bundle."""
    module = sys.modules[cls.__module__]
    origin = getattr(module, ORIGIN, cls.__module__)
    if hasattr(module, ORIGIN):
        bundle = Path(module.__file__).read_text(encoding="utf-8")
    else:
        bundle = bundle_source(origin)
    # the shim's own text is a part of the hash, with a bundle's name of constant length in it
    digest = hashlib.sha256((_shim(origin, cls.__name__, "") + bundle).encode()).hexdigest()[:12]
    stem = f"{PACKAGE}_{origin.rsplit('.', 1)[-1]}_{digest}"
    return CodeFiles(stem, _shim(origin, cls.__name__, f"{stem}_code"), f"{stem}_code", bundle)


def bundle_source(module: str) -> str:
    """One self-contained source text of a module of ours: its own modules inlined before it, in order of need.

    The modules must import each other as `from unet_attn.x import name`, at the top and without renaming.
    """
    imports: dict[str, None] = {}
    bodies: dict[str, str] = {}
    _collect(module, imports, bodies)
    head = f'"""The code of {module}, written by {PACKAGE} for use where it is not installed."""'
    parts = [head, "\n".join(imports), *bodies.values(), f'{ORIGIN} = "{module}"']
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def _collect(module: str, imports: dict[str, None], bodies: dict[str, str]) -> None:
    """Add a module's foreign imports and its body, after those of the modules of ours that it needs."""
    source = Path(find_spec(module).origin).read_text(encoding="utf-8")
    lines = source.splitlines()
    tree = ast.parse(source)
    docstring = tree.body[0] if ast.get_docstring(tree) is not None else None
    for node in tree.body:
        if node is not docstring and not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == PACKAGE:
            if node.module not in bodies:
                _collect(node.module, imports, bodies)
        elif node is not docstring:
            imports[ast.unparse(node)] = None
    bodies[module] = _with_names_of_its_own("\n".join(lines), module, bodies)


def _with_names_of_its_own(body: str, module: str, bodies: dict[str, str]) -> str:
    """The body with its private names renamed where another module of the bundle has the same for something else."""
    taken = set().union(*map(_defined, bodies.values()))
    for name in sorted(_defined(body) & taken):
        if name.startswith("_") and not name.startswith("__"):
            # not behind a dot: an attribute of that name is another thing
            body = re.sub(rf"(?<![\w.]){name}\b", f"{name}_of_{module.rsplit('.', 1)[-1]}", body)
    return body


def _defined(body: str) -> set[str]:
    """The names that a source text binds at its top."""
    names: set[str] = set()
    for node in ast.parse(body).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {
                part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
    return names


def _shim(origin: str, name: str, bundle: str) -> str:
    """The file that the index names.

    It looks the installed module up by name: diffusers would warn of an import statement whose package is missing, and
    copies along only what the file itself imports from beside it.
    """
    lines = [
        f'"""{name} of {PACKAGE}: the installed one, or else the copy beside this file."""',
        "",
        "import importlib",
        "",
        "try:",
        f'    {name} = importlib.import_module("{origin}").{name}',
        "except (ModuleNotFoundError, AttributeError):",
        f"    from .{bundle} import {name}",
        "",
    ]
    return "\n".join(lines)


def _is_ours(cls: type) -> bool:
    module = cls.__module__
    return module.split(".")[0] == PACKAGE or hasattr(sys.modules.get(module), ORIGIN)


def _class_of(part: object) -> type:
    """The class of a part, under torch.compile's wrapping."""
    return type(getattr(part, "_orig_mod", part))


def _write(directory: Path, files: CodeFiles) -> str:
    """Write both files and return the shim's name. Files of the same pattern from an earlier save are removed."""
    kind = files.shim_name.rsplit("_", 1)[0]
    kept = {f"{files.shim_name}.py", f"{files.bundle_name}.py"}
    for old in directory.glob(f"{kind}_*.py"):
        if old.name not in kept:
            old.unlink()
    _replace(directory / f"{files.bundle_name}.py", files.bundle)
    _replace(directory / f"{files.shim_name}.py", files.shim)
    return files.shim_name


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
