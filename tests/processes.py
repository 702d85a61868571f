"""Processes for the tests that need several, or need one to die: each starts in a moment and is as good as new.

They are forked from a server that has imported the libraries once and done nothing else, so a start does not take the
ten seconds of the imports, and no thread or state of the tests comes along.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["unet_attn.training", "unet_attn.evaluation", "torch.distributed.fsdp", "jsonargparse"]
)


def start(work: Callable[..., Any], *arguments: Any, variables: dict[str, str] | None = None) -> ForkServerProcess:
    """Start `work(*arguments)`, both importable by name; its result, 0 to 255 or None, becomes the exit code.

    variables: of the environment, set before it begins.
    """
    process = _context.Process(target=_run, args=(work, arguments, variables or {}), daemon=True)
    process.start()
    return process


def run_group(work: Callable[..., Any], *arguments: Any, size: int = 2, seconds: float = 120) -> None:
    """Run `work` in `size` processes that find each other as those of `accelerate launch` do.

    Raises AssertionError if one fails (its traceback is on stderr) or they take longer than `seconds`; none is left.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        start(work, *arguments, variables=group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)
    ]
    try:
        for process in processes:
            process.join(seconds)
        codes = [process.exitcode for process in processes]
        assert codes == [0] * size, f"{work.__name__} in {size} processes ended with {codes} (None: not at all)"
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(work: Callable[..., Any], arguments: tuple[Any, ...], variables: dict[str, str]) -> None:
    os.environ.update(variables)
    raise SystemExit(work(*arguments))
