"""Several processes at one piece of work, as `accelerate launch` starts them, without one waiting for ever for another.

Whatever fails in one process is told to all before any of them goes on, so that none is left alone in a meeting.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
# Shares are never equally fast, and one process reads a large data set before the others; the group's own limit is ten
# minutes.
LONGEST_WAIT = timedelta(days=1)


class OtherProcessError(ValueError):
    """What went wrong in another process, in one line."""


class Processes:
    """The processes of this launch; a script that was not launched by anything is one process.

    rank, count: which of how many this is; device: its own, None if it was not launched.
    Raises ValueError for a launch whose processes would not know of each other.
    """

    def __init__(self, script: str) -> None:
        self.rank, self.count = 0, 1
        self.device: torch.device | None = None
        use = f"use accelerate launch --multi_gpu --num_processes 2 scripts/{script} ..., without --cpu"
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        # the launcher leaves the address of a rendezvous, yet starts one process, which then is alone
        alone = "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ
        if alone and os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
            raise ValueError(f"accelerate launch --cpu starts one process whatever was asked for: {use}")
        if launched == 1:
            return
        from accelerate import PartialState
        from torch import accelerator

        # that of an Accelerator, where one was made before
        state = PartialState(cpu=not accelerator.is_available(), timeout=LONGEST_WAIT)
        if state.num_processes != launched:
            raise ValueError(
                f"{launched} processes were launched, but Accelerate sees {state.num_processes}, so each would do all "
                f"of the work: {use}"
            )
        self.rank, self.count, self.device = state.process_index, state.num_processes, state.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def each(self, work: Callable[[], T]) -> T:
        """Do something in every process; returns this one's own result. Raises in all what was raised in one."""
        result, error = _tried(work)
        self._tell(None, error)
        return result

    def of_main(self, work: Callable[[], T]) -> T:
        """Do something in the main process alone; returns its result, which can be pickled, in all."""
        return self._tell(*(_tried(work) if self.is_main else (None, None)))[0]

    def of_all(self, work: Callable[[], T]) -> list[T]:
        """Do something in every process; returns all results, which can be pickled, in the order of the processes."""
        return self._tell(*_tried(work))

    def part(self) -> None:
        """End the meetings; every process goes its own way from here."""
        if self.count > 1:
            import torch

            torch.distributed.destroy_process_group()
            self.count = 1

    def _tell(self, result: Any, error: Exception | None) -> list[Any]:
        told = [(result, None)]
        if self.count > 1:
            from accelerate.utils import gather_object

            fault = error and f"process {self.rank}: {str(error) or type(error).__name__}"
            told = gather_object([(result, fault)])
        if error is not None:
            raise error
        for _, fault in told:
            if fault is not None:
                raise OtherProcessError(fault)
        return [each for each, _ in told]


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # it is raised again once all have been told
        return None, error
