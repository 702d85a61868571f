"""How far a run is, by steps or by the clock, and how long the parts of it take."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic


class RunClock:
    """The time that a run has taken, over all its sessions, and what part of it that is.

    max_steps, max_minutes: the ends of the run, either None; the first that is reached counts.
    durations: how long each kind of work took the last time, in seconds, by name.
    """

    def __init__(self, *, max_steps: int | None, max_minutes: float | None) -> None:
        self.max_steps, self.max_minutes = max_steps, max_minutes
        self.seconds_before = 0.0  # what earlier sessions of this run took
        self.started: float | None = None
        self.durations: dict[str, float] = {}

    def start(self) -> None:
        self.started = monotonic()

    def seconds(self) -> float:
        """How long the run has gone on, in all sessions."""
        return self.seconds_before + (0.0 if self.started is None else monotonic() - self.started)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Take down how long the context lasts."""
        began = monotonic()
        yield
        self.durations[name] = monotonic() - began

    def progress(self, step: int, *, seconds_at_end: float) -> float:
        """The part of the run that is done after `step` steps, in [0, 1].

        seconds_at_end: what comes after the last step (saving, a last look), for which a run by the clock leaves time.
        """
        parts = []
        if self.max_steps is not None:
            parts.append(step / self.max_steps)
        if self.max_minutes is not None:
            limit = 60 * self.max_minutes
            budget = max(limit / 2, limit - seconds_at_end)
            # a further step that would end later than it should begin is not begun
            parts.append((self.seconds() + self.durations.get("step", 0.0) / 2) / budget)
        return min(1.0, max(parts))
