"""One command in a process of its own, so that its memory is its own and its end is noticed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LAST_LINES = 3  # of a log, that an error quotes


def run_alone(command: Sequence[str | Path], *, log: Path) -> int:
    """Run it to its end, its output into `log`; returns the exit code, or minus the signal that ended it.

    The command does not outlive this process if that is interrupted or asked to end: it would go on eating the cores
    that whatever comes next is measured on.
    """
    environment = os.environ | {"TQDM_DISABLE": "1"}  # peers' bars would fill the log
    with log.open("w", encoding="utf-8") as stream, _ending_by_exception():
        done = subprocess.run([str(part) for part in command], stdout=stream, stderr=subprocess.STDOUT, env=environment)
    return done.returncode


def last_words(log: Path) -> str:
    """The end of a log as one line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-LAST_LINES:]) or "it printed nothing"


@contextmanager
def _ending_by_exception() -> Iterator[None]:
    """SIGTERM raises SystemExit meanwhile, on which subprocess.run ends its child."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
