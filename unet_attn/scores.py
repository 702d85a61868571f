"""The figures of evaluation.json in words, for a report and a model card."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from unet_attn.faults import counted


class Score(NamedTuple):
    """A measure, its value with its standard error as text, and what it tells."""

    name: str
    value: str
    tells: str


def score_rows(evaluation: Mapping[str, Any]) -> list[Score]:
    """The scores that an evaluation holds; those that it lacks, as older releases measured fewer, are left out."""
    loss, copies, agreement = (_part(evaluation, name) for name in ("loss", "copies", "agreement"))
    where = _trained_on(loss)
    among, excess = _estimate(copies, "rate_among_training"), _estimate(copies, "excess")
    rows = [
        Score(
            "KID x 1000",
            as_text(evaluation.get("kid"), evaluation.get("kid_error"), factor=1000, digits=2),
            "distance of the sampled pictures from the real ones as a whole; 0 = no difference to be seen",
        ),
        Score(
            "Frechet distance",
            as_text(evaluation.get("frechet"), evaluation.get("frechet_error"), digits=2),
            "the same by mean and covariance; above 0 even for equal sets, the more the fewer the pictures",
        ),
        Score(
            "precision",
            as_text(evaluation.get("precision"), evaluation.get("precision_error")),
            "share of sampled pictures that look like real ones",
        ),
        Score(
            "recall",
            as_text(evaluation.get("recall"), evaluation.get("recall_error")),
            "share of real pictures whose like is sampled",
        ),
        Score(
            "loss",
            _estimate(loss, "true" if "true" in loss else "empty", digits=4),
            f"how well noise is removed{', ' + where if where else ''}",
        ),
        Score(
            "gap, exchanged captions",
            _estimate(loss, "gap_exchanged", digits=4),
            "rise of the loss with another picture's caption; 0 = the text is ignored",
        ),
        Score("gap, empty captions", _estimate(loss, "gap_empty", digits=4), "rise of the loss without a caption"),
        Score(
            "near copies",
            _estimate(copies, "rate"),
            "share that repeats a training picture"
            + (f"; of the training pictures themselves {among}" if among else "")
            + (f", excess {excess}" if excess else ""),
        ),
        Score(
            "caption agreement",
            _estimate(agreement, "rate"),
            f"how often a judge finds the caption among 100{_ceiling(agreement)}",
        ),
    ]
    return [row for row in rows if row.value]


def _trained_on(loss: Mapping[str, Any]) -> str:
    """Whether the loss is one of training, as far as the evaluation knew."""
    known, saw, of = (loss.get(name) for name in ("on_training_data", "trained_on", "pictures"))
    if known is not None:
        return "on training data" if known else "on pictures that training never saw"
    return f"on {of} pictures, {saw} of which were trained on" if _is_number(saw) and _is_number(of) else ""


def _ceiling(agreement: Mapping[str, Any]) -> str:
    """What an agreement is to be held beside; nothing where an older release measured none."""
    real, chance = _estimate(agreement, "real"), as_text(agreement.get("chance"))
    if not real:
        return ""
    held_out = as_text(agreement.get("held_out"))
    new = f" ({held_out} of pictures new to the judge)" if held_out else ""
    return f"; of the real pictures of these captions {real}{new}, chance {chance}"


def how_measured(evaluation: Mapping[str, Any]) -> str:
    """How many pictures were compared, in which features, and how they were sampled: one sentence without paths."""
    sampled, real = evaluation.get("sampled_pictures"), evaluation.get("real_pictures")
    parts = []
    if isinstance(sampled, int) and isinstance(real, int):
        parts.append(f"{counted(sampled, 'sampled picture')} against {real} real")
    for name, words in (
        ("extractor", "features of {}"),
        ("resolution", "{} px"),
        ("steps", "{} sampling steps"),
        ("guidance_scale", "guidance {}"),
        ("scheduler", "scheduler {}"),
        ("seed", "seeds from {}"),
    ):
        if evaluation.get(name) is not None:
            # a judge is named by its folder, of which only the last part is anybody else's business
            parts.append(words.format(re.sub(r"\S*/", "", str(evaluation[name]))))
    return "; ".join(parts) + "." if parts else ""


def as_text(value: object, error: object = None, *, factor: float = 1, digits: int = 3) -> str:
    """A value with its standard error where that is known; empty for what is no number."""
    if not _is_number(value):
        return ""
    text = f"{factor * value:.{digits}f}"
    return f"{text} ± {factor * error:.{digits}f}" if _is_number(error) else text


def _estimate(part: Mapping[str, Any], name: str, *, digits: int = 3) -> str:
    figure = _part(part, name)
    return as_text(figure.get("value"), figure.get("error"), digits=digits)


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = whole.get(name)
    return part if isinstance(part, Mapping) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
