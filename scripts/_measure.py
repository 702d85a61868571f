"""What benchmark.py measures with: clocks, memory, and the matrix products of a piece of code timed alone."""

import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


def describe_machine() -> str:
    model = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    return f"{model}, {os.cpu_count()} cores; torch {torch.__version__}, {torch.get_num_threads()} threads, float32"


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def resident_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (highest) of this process. Raises OSError where there is no /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {field}")


class _TensorLike(NamedTuple):
    """A tensor without its values: what decides how long an operation on it takes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def new(self) -> Tensor:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return torch.randn(elements).to(self.dtype).as_strided(self.shape, self.stride)


class _Product(NamedTuple):
    """One convolution or matrix product, forward or backward, with its arguments' shapes and layouts."""

    operation: Any  # torch's OpOverload
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    def seconds_alone(self, repeats: int = 5) -> float:
        arguments = [_filled(value) for value in self.arguments]
        options = {name: _filled(value) for name, value in self.options}
        with torch.no_grad():
            self.operation(*arguments, **options)
            return statistics.median(seconds(lambda: self.operation(*arguments, **options)) for _ in range(repeats))


class ProductRecorder(TorchDispatchMode):
    """Records every convolution and matrix product that runs inside, backward passes and optimizers included.

    They are those whose FLOPs torch.utils.flop_counter knows. On a CPU that leaves fused attention out, here some
    hundredths of the whole, so that both the FLOP count and the time alone are without it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[_Product] = Counter()
        self.flop = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flop += formula(*args, **(kwargs or {}), out_val=result)
            options = tuple((name, _emptied(value)) for name, value in (kwargs or {}).items())
            self.products[_Product(func, tuple(map(_emptied, args)), options)] += 1
        return result

    def seconds_alone(self) -> float:
        """The same products, each kind timed by itself with the same shapes and layouts, summed."""
        return sum(count * product.seconds_alone() for product, count in self.products.items())


def _emptied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _TensorLike(tuple(value.shape), value.stride(), value.dtype)
    return tuple(value) if isinstance(value, list) else value


def _filled(value: Any) -> Any:
    return value.new() if isinstance(value, _TensorLike) else value
