"""Checkpoints that are complete or absent, in folders `step-000500`.

A checkpoint is written beside its place under another name, synced to disk and renamed; the manifest with every
file's size and hash is written last. So a folder that was cut short by a crash or a full disk is recognised and never
used. Tensors are stored as safetensors and everything else as JSON: nothing is unpickled.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT_VERSION = 1
STATE = "state.json"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)")
_REMAINS = (".step-*.partial", ".step-*.old")  # of a crash; its step may never be saved again


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, found or trusted."""


class Checkpoint(NamedTuple):
    """What a checkpoint folder holds.

    tensors: by file (`model`, `ema`, `optimizer`) and then by name; state: counters and settings; path: the folder.
    """

    path: Path
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save_checkpoint(
    directory: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> Path:
    """Write checkpoint number `step` into `directory` and return its folder. To be called by one process only.

    keep: how many checkpoints remain, the new one included, None = all; older ones go when the new one is complete.
    write_more: writes further files into the folder it is given.
    Raises CheckpointError when the disk refuses; earlier checkpoints are then intact and nothing half-written remains.
    """
    final = directory / f"step-{step:06d}"
    partial = directory / f".{final.name}.partial"
    try:
        for pattern in _REMAINS:
            for left in directory.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, group in tensors.items():
            save_file(_apart(group), partial / f"{name}.safetensors")
        if write_more is not None:
            write_more(partial)
        write_json(partial / STATE, {"format_version": FORMAT_VERSION, "step": step, **state})
        _seal(partial)
        _replace(partial, final)
    except Exception as error:  # safetensors reports a full disk with an exception of its own
        shutil.rmtree(partial, ignore_errors=True)
        remedy = f"what was complete before is intact: {_make_room(error)}continue with --train.resume latest"
        if not any(fault(path) is None for path in numbered(directory)):
            remedy = f"nothing was complete before: {_make_room(error)}remove {directory.parent} and start again"
        raise CheckpointError(f"{final} could not be written ({error}); {remedy}") from error
    if keep is not None:
        _prune(final, keep)
    return final


def load_checkpoint(path: Path, *, checked: bool = False) -> Checkpoint:
    """Read a checkpoint folder after checking it against its manifest. Raises CheckpointError saying what is wrong.

    checked: this process has just had it from `find_checkpoint`, so that gigabytes need not be hashed once more.
    """
    if not checked:
        _check(path)
    # those of the manifest: another file that lies there was not checked
    names = [name for name in _listed(path) if "/" not in name and name.endswith(".safetensors")]
    tensors = {Path(name).stem: load_file(path / name) for name in names}
    return Checkpoint(path=path, tensors=tensors, state=load_state(path))


def load_state(path: Path) -> dict[str, Any]:
    """What a checkpoint that was found good says of itself. Raises CheckpointError if another version wrote it."""
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    if state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format_version {state.get('format_version')}, this release of unet-attn reads "
            f"{FORMAT_VERSION}: install a release that reads {state.get('format_version')}"
        )
    return state


def find_checkpoint(directory: Path, resume: str) -> Path:
    """The checkpoint that `resume` means: `latest` in `directory`, or the path of one.

    `latest` is the highest step that is complete; incomplete ones are passed over with a warning that names them.
    Raises CheckpointError if there is none, or if that of the path is not complete.
    """
    if not resume:
        raise CheckpointError("train.resume is empty: give latest, the path of a checkpoint, or null for a fresh run")
    if resume != "latest":
        _check(Path(resume))
        return Path(resume)
    for path in reversed(numbered(directory)):
        reason = fault(path)
        if reason is None:
            return path
        warnings.warn(f"checkpoint {path} is passed over: {reason}", stacklevel=2)
    raise CheckpointError(
        f"there is no complete checkpoint in {directory}: remove {directory.parent} and start without --train.resume"
    )


def numbered(directory: Path) -> list[Path]:
    """The folders in `directory` that are named as checkpoints, by step; files and other names do not count."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint folder's name tells."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not named as a checkpoint, step-NUMBER")
    return int(match[1])


def fault(path: Path) -> str | None:
    """What is wrong with the checkpoint folder `path`: None if every file is there with the size and hash it had."""
    reason = _fault_of_sizes(path)
    if reason is not None:
        return reason
    for name, entry in _listed(path).items():
        if _hash(path / name) != entry["sha256"]:
            return f"the contents of {name} are not what was written"
    return None


def _check(path: Path) -> None:
    if (path / "checkpoints").is_dir():
        raise CheckpointError(
            f"{path} is a run and no checkpoint: give --train.output_dir {path} --train.resume latest, or a folder in "
            f"{path / 'checkpoints'}"
        )
    if inside := numbered(path):
        raise CheckpointError(
            f"{path} holds checkpoints and is none: give --train.output_dir {path.absolute().parent} --train.resume "
            f"latest, or one of them, as {inside[-1]}"
        )
    if (reason := fault(path)) is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used: {reason}")


def _fault_of_sizes(path: Path) -> str | None:
    """What is wrong with the checkpoint folder `path` that shows without its files being read."""
    if not path.is_dir():
        return "there is no such folder"
    try:
        files = {name: (entry["size"], entry["sha256"]) for name, entry in _listed(path).items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so writing it was interrupted"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} cannot be read"
    if not files:
        return f"its {MANIFEST} lists no files"
    for name, (size, _) in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes where {size} were written"
    return None


def _listed(path: Path) -> dict[str, dict[str, Any]]:
    """The files that a checkpoint's manifest names, with their sizes and hashes."""
    return json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]


def replace_files(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside, then put each of its files and folders in its place within `folder`.

    What `folder` holds besides stays. A failure while writing leaves everything as it was.
    """
    partial = folder / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        try:
            write(partial)
        except Exception as error:  # safetensors reports a full disk with an exception of its own
            raise CheckpointError(
                f"{folder} could not be written ({error}); what it held is intact: {_make_room(error)}repeat the "
                "command, a training run with --train.resume latest"
            ) from error
        for entry in sorted(partial.iterdir()):
            _replace(entry, folder / entry.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all; text as UTF-8."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON for people and machines; not-a-number is refused, since JSON has none."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _apart(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, each in memory of its own, as safetensors wants them; only what shares some is copied."""
    plain, taken = {}, set()
    for key, tensor in group.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        plain[key] = tensor.clone() if place in taken else tensor
        taken.add(place)
    return plain


def _make_room(error: Exception) -> str:
    """What helps first where the disk has refused, which safetensors tells by the number of the system's error."""
    return "make room on the disk, then " if isinstance(error, OSError) or "(os error " in str(error) else ""


def _seal(folder: Path) -> None:
    """Sync every file to disk, then write and sync the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files:
        _sync(file)
    described = {
        file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "sha256": _hash(file)} for file in files
    }
    write_json(folder / MANIFEST, {"files": described})
    _sync(folder / MANIFEST)
    _sync(folder)


def _replace(partial: Path, final: Path) -> None:
    """Put a finished file or folder in its place. A folder that stands there gives way only then."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.is_dir():
        final.rename(old)
    partial.replace(final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _prune(newest: Path, keep: int) -> None:
    """Of the checkpoints up to `newest`, leave the last `keep` whose files have the size that was written.

    `newest` always stays. Contents are not hashed, which would take as long as writing them.
    """
    folders = numbered(newest.parent)
    candidates = folders[: folders.index(newest) + 1]
    kept = [path for path in candidates if path == newest or _fault_of_sizes(path) is None][-max(1, keep) :]
    for path in candidates:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
