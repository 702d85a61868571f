"""Loading that raises where diffusers only warns, so that no weight of a loaded model is left random or empty."""

from os import PathLike
from typing import Any, Self

import torch

NAMED_AT_MOST = 8  # keys in one message
SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# the others of torch hold weights, but its layers do not compute in them
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class StrictLoading:
    """Stands before diffusers' ModelMixin among a class' bases, and makes its `from_pretrained` strict."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike, *, output_loading_info: bool = False, **options: Any
    ) -> Self | tuple[Self, dict[str, Any]]:
        """A model exactly as it was saved; options: as diffusers' ModelMixin takes them, a dtype by its name too.

        Raises ValueError if weights are missing, left over, or, with or without `ignore_mismatched_sizes`, of another
        shape, naming them, and for a dtype that it cannot compute in.
        """
        # diffusers takes a name for float32, with a warning
        options |= {name: parse_dtype(options[name]) for name in ("dtype", "torch_dtype") if name in options}
        # reported with the rest, rather than one of them by another error
        options["ignore_mismatched_sizes"] = True
        model, report = super().from_pretrained(pretrained_model_name_or_path, output_loading_info=True, **options)
        faults = [
            f"{kind} {some_keys([key[0] if isinstance(key, tuple) else key for key in report[name]])}"
            for kind, name in (
                ("missing", "missing_keys"),
                ("unexpected", "unexpected_keys"),
                ("of another shape", "mismatched_keys"),
            )
            if report.get(name)  # a format of diffusers comes without a report
        ]
        if faults:
            raise ValueError(
                f"the weights in {pretrained_model_name_or_path} are not those of this {cls.__name__}: "
                + "; ".join(faults)
            )
        return (model, report) if output_loading_info else model


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """`torch.float16`, "float16" or "fp16" to the dtype. Raises ValueError for one that no network computes in."""
    found = dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        found = getattr(torch, SHORT_DTYPES.get(name, name), None)
    # compared by identity, as an array would compare its numbers
    if dtype is None or any(found is each for each in DTYPES):
        return found
    raise ValueError(f"dtype must be float32, float16, bfloat16, float64 or such a torch dtype, got {dtype!r}")


def is_whole(value: object) -> bool:
    """Whether a value of a configuration is a whole number, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def some_keys(keys: list[str]) -> str:
    """Keys for a message, in order: no more than a reader would read."""
    keys = sorted(keys)
    more = f" and {len(keys) - NAMED_AT_MOST} more" if len(keys) > NAMED_AT_MOST else ""
    return ", ".join(keys[:NAMED_AT_MOST]) + more
