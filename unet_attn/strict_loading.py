"""Loading that raises where diffusers only warns, so that no weight of a loaded model is left random or empty."""

from os import PathLike
from typing import Any, Self

NAMED_AT_MOST = 8  # keys in one message


class StrictLoading:
    """Stands before diffusers' ModelMixin among a class' bases, and makes its `from_pretrained` strict."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike, *, output_loading_info: bool = False, **options: Any
    ) -> Self | tuple[Self, dict[str, Any]]:
        """A model exactly as it was saved; options: as diffusers' ModelMixin takes them.

        Raises ValueError if weights are missing, left over, or, with or without `ignore_mismatched_sizes`, of another
        shape, naming them.
        """
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


def some_keys(keys: list[str]) -> str:
    """Keys for a message, in order: no more than a reader would read."""
    keys = sorted(keys)
    more = f" and {len(keys) - NAMED_AT_MOST} more" if len(keys) > NAMED_AT_MOST else ""
    return ", ".join(keys[:NAMED_AT_MOST]) + more
