"""The report of a run: one HTML file with all that is known of it, which opens anywhere and needs nothing else.

What was not measured is said, with the command that would measure it. The same folder gives the same bytes.
"""

import shlex
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from unet_attn.charts import BUCKETS, Line, chart, curve
from unet_attn.checkpoint import write_whole
from unet_attn.faults import counted
from unet_attn.report_page import (
    Section,
    charts,
    folded,
    missing,
    page,
    paragraph,
    pictures,
    table,
    tiles,
    verbatim,
)
from unet_attn.run_record import (
    NEAREST,
    SKIPPED,
    Metrics,
    RunRecord,
    parameter_count,
    read_run,
)
from unet_attn.scores import as_text, how_measured, score_rows

REPORT = "report.html"
MOST_GRIDS = 8
MOST_VALIDATIONS = 50  # points with error bars in a chart
MOST_LISTED = 50  # skipped files and steps
FINISHED = {  # the losses of evaluate.py, as they are called for a model with text
    "true": "loss",
    "exchanged": "loss with another picture's caption",
    "empty": "loss without a caption",
    "gap_exchanged": "gap, another picture's caption",
    "gap_empty": "gap, no caption",
}
LAST_STEPS = 100  # whose mean is "the last loss": a single step's is mostly noise

Item = TypeVar("Item")


def write_report(run: Path) -> Path:
    """Write RUN/report.html and return its path.

    Raises ValueError for what is no run or holds a damaged file, OSError if a file cannot be read or written.
    """
    record = read_run(run)
    path = run / REPORT
    write_whole(path, as_html(record))
    return path


def as_html(record: RunRecord) -> str:
    """The page. Sections without data are left out, or say how to come by it."""
    made = [
        _curves(record),
        _by_noise(record),
        _validation(record),
        _grids(record),
        _scores(record),
        _copies(record),
        _throughput(record),
        _data(record),
        _skipped_files(record),
        _settings(record),
    ]
    return page(record.name, _head(record), [section for section in made if section is not None])


# ---- the head


def _head(record: RunRecord) -> str:
    metrics, resolution = record.metrics, record.setting("data", "resolution")
    kind = "text-to-image model" if record.has_text else "model without text"
    weights = [parameter_count(record.folder / part) for part in ("unet", "text_encoder")]
    size = f" of {sum(filter(None, weights)) / 1e6:.1f} million parameters" if any(weights) else ""
    count = f"{record.pictures:,} pictures of " if record.pictures else ""
    grey = {"1": "grey", "3": "colour"}.get(str(record.setting("unet", "in_channels")), "")
    sides = f", {resolution} x {resolution} {grey}".rstrip() if resolution else ""
    made = f"tuned from {record.tuned_from} to draw in few steps," if record.tuned_from else "trained from scratch"
    lede = f"A {kind}{size}, {made} on {count}{Path(record.data_path).name or 'unknown data'}{sides}."
    if not len(metrics):
        return paragraph(lede, kind="lede") + paragraph("The run has not finished a step yet.")

    planned = record.setting("train", "max_steps")
    of = f" of {planned:,}" if isinstance(planned, int) and record.steps < planned else ""
    shown = [(f"{record.steps:,}{of}", "steps")]
    if (seen := metrics.last("pictures_seen")) is not None:
        visits = f", each {seen / record.pictures:.1f} times" if record.pictures else ""
        shown.append((f"{seen:,.0f}", f"pictures seen{visits}"))
    if record.seconds is not None:
        shown.append((_duration(record.seconds), "of training, saving included"))
    if (loss := _last_loss(metrics)) is not None:
        shown.append((f"{loss:.4f}", f"loss, mean of the last {min(LAST_STEPS, len(metrics))} steps"))
    for name, words in (("true", "validation loss"), ("gap_exchanged", "gap with exchanged captions")):
        figure = record.validation[-1].get(name) if record.validation else None
        if isinstance(figure, dict) and _is_number(figure.get("value")):
            shown.append((f"{figure['value']:.4f}", words))
    return paragraph(lede, kind="lede") + tiles(shown)


def _last_loss(metrics: Metrics) -> float | None:
    losses = metrics["loss"][-LAST_STEPS:]
    losses = losses[np.isfinite(losses)]
    return float(losses.mean()) if len(losses) else None


# ---- training


def _curves(record: RunRecord) -> Section | None:
    metrics = record.metrics
    if not len(metrics):
        return None
    figures = []
    for name, title, told, log in (
        ("loss", "Loss", "The line runs through the middle of the steps, the band holds nine tenths of them.", True),
        ("lr", "Learning rate", "As the schedule set it. Muon's own rate, if it is used, has the same shape.", False),
        ("grad_norm", "Gradient norm", "Before clipping. Spikes are single bad batches; a rise is a warning.", True),
    ):
        line = _schedule(metrics) if name == "lr" else curve(metrics["step"], metrics[name])
        if len(line.values):
            figures.append((chart({"": line}, title=title, across="step", up="", log=log), told))
    skipped, body = metrics.skipped_steps, charts(figures)
    if skipped:
        listed = ", ".join(map(str, skipped[:MOST_LISTED]))
        more = f" and {len(skipped) - MOST_LISTED} more" if len(skipped) > MOST_LISTED else ""
        told = counted(len(skipped), "step was", "steps were")
        body += paragraph(f"{told} skipped, as loss or gradient was not finite: {listed}{more}.")
    else:
        body += paragraph("No step was skipped.")
    if metrics.unreadable:
        body += paragraph(f"{counted(metrics.unreadable, 'line')} of metrics.jsonl could not be read.")
    return Section("Curves", "curves", body)


def _schedule(metrics: Metrics) -> Line:
    """The learning rate as it was: it is exact, and nothing in it is to be smoothed."""
    pairs = zip(metrics["step"].tolist(), metrics["lr"].tolist(), strict=True)
    shown = _spread([pair for pair in pairs if isfinite(pair[1])], BUCKETS)
    return Line([step for step, _ in shown], [rate for _, rate in shown])


def _by_noise(record: RunRecord) -> Section | None:
    metrics, figures = record.metrics, []
    parts = {name: Line(*points) for name, points in metrics.loss_by_part().items()}
    if parts:
        across = "noise (0 = clean, 1 = noise)"
        drawing = chart(parts, title="Training loss by noise level", across=across, up="", log=True)
        told = "Means over the first, a middle and the last twentieth of the steps. "
        told += (
            "What a tuning to few steps aims at changes as it goes, so the end need not lie lower."
            if record.tuned_from
            else "The end should lie lower everywhere."
        )
        figures.append((drawing, told))
    last, title = _evaluated_loss(record), "Evaluation by noise level"
    if record.validation:
        last, title = record.validation[-1], "Last validation by noise level"
    times, kinds = last.get("times"), last.get("by_time")
    if isinstance(times, list) and isinstance(kinds, dict):
        lines = {str(kind): Line(times, values) for kind, values in kinds.items() if _all_numbers(values, len(times))}
        if lines:
            drawing = chart(lines, title=title, across="noise (0 = clean, 1 = noise)", up="")
            told = "With true, exchanged and empty captions. The more the lines part, the more the text matters."
            figures.append((drawing, told if record.has_text else "At fixed noise, with the averaged weights."))
    if figures:
        return Section("Loss by noise level", "noise", charts(figures))
    return (
        None
        if not len(metrics)
        else Section(
            "Loss by noise level",
            "noise",
            missing("Not recorded by this run. This measures it for the finished model:", _evaluate(record)),
        )
    )


def _validation(record: RunRecord) -> Section | None:
    lines = _spread([line for line in record.validation if _is_number(line.get("step"))], MOST_VALIDATIONS)
    losses = {kind: _estimates(lines, kind) for kind in ("true", "exchanged", "empty")}
    gaps = {
        "true": Line([], []),
        "exchanged": _estimates(lines, "gap_exchanged"),
        "empty": _estimates(lines, "gap_empty"),
    }
    figures = []
    for title, kinds, told in (
        ("Loss at fixed noise", losses, "Averaged weights, unweighted. Bars are standard errors."),
        (
            "Conditioning gap",
            gaps,
            "How much the loss rises with another picture's caption, or none. At 0 the text is ignored.",
        ),
    ):
        if any(line.values for line in kinds.values()):
            figures.append((chart(kinds, title=title, across="step", up=""), told))
    if not figures:
        if not len(record.metrics):
            return None
        why = (
            "This run did not validate as it went: train.validate_every does that, on pictures that "
            "data.validation_share holds out."
        )
        body = _evaluated(record)
        if body is None:
            body = missing(f"{why} This measures loss and gap of the finished model:", _evaluate(record))
        else:
            body = paragraph(why) + body
        return Section("Validation", "validation", body)
    last = lines[-1]
    seen = {True: "are held out of training", False: "are also trained on"}.get(last.get("held_out"))
    of = f" on {counted(last['pictures'], 'picture')}" if isinstance(last.get("pictures"), int) else ""
    told = f"Measured{of}{f' that {seen}' if seen else ''}, the same noise and times at every validation."
    return Section("Validation", "validation", paragraph(told) + charts(figures))


def _evaluated_loss(record: RunRecord) -> dict[str, Any]:
    """What evaluate.py found of the loss; empty where it was not run, or by an older release."""
    loss = (record.evaluation or {}).get("loss")
    return loss if isinstance(loss, dict) else {}


def _evaluated(record: RunRecord) -> str | None:
    """What evaluate.py found of the loss, for a run that did not validate; None where it found nothing."""
    loss = _evaluated_loss(record)
    names = FINISHED if record.has_text else {"empty": "loss"}
    figures = [(words, loss[name]) for name, words in names.items() if isinstance(loss.get(name), dict)]
    rows = [(words, as_text(each.get("value"), each.get("error"), digits=4)) for words, each in figures]
    if not (rows := [row for row in rows if row[1]]):
        return None
    seen = {True: " that it was trained on", False: " that training never saw"}.get(loss.get("on_training_data"), "")
    if not seen and isinstance(loss.get("trained_on"), int):  # data of which the run had a part
        seen = f", of which it was trained on {loss['trained_on']}"
    of = f" on {counted(loss['pictures'], 'picture')}{seen}" if isinstance(loss.get("pictures"), int) else ""
    told = f"evaluate.py measured the model as it was then{of}, at fixed noise."
    if len(rows) > 1:
        told += " At a gap of 0 the text is ignored."
    return paragraph(told) + table(("", "value ± standard error"), rows)


def _estimates(lines: Sequence[dict[str, Any]], name: str) -> Line:
    """An estimate of the validations over the steps, with its error bars."""
    known = [(line["step"], line.get(name)) for line in lines]
    known = [
        (step, figure["value"], figure["error"] if _is_number(figure.get("error")) else 0.0)
        for step, figure in known
        if isinstance(figure, dict) and _is_number(figure.get("value"))
    ]
    steps, values, errors = ([each[n] for each in known] for n in range(3))
    return Line(steps, values, errors=errors)


# ---- pictures and scores


def _grids(record: RunRecord) -> Section | None:
    if not record.grids:
        if not len(record.metrics):
            return None
        prompts = " --prompt 'a caption' --num_images 8" if record.has_text else " --num_images 8"
        why = "No grids were drawn as training went: train.sample_every does that. This draws pictures now:"
        command = f"python scripts/sample.py {record.shown_path}{prompts}"
        return Section("Fixed prompts over time", "grids", missing(why, command))
    metrics = record.metrics
    seen = dict(zip(metrics["step"].tolist(), metrics["pictures_seen"].tolist(), strict=True))
    shown = []
    for step, path in _spread(record.grids, MOST_GRIDS):
        after = seen.get(float(step))
        shown.append((path, f"step {step:,}" + (f", {after:,.0f} pictures seen" if after and isfinite(after) else "")))
    prompts = record.setting("train", "sample_prompts")
    told = "The same noise each time, by the averaged weights"
    if isinstance(prompts, list) and prompts:
        told += "; prompts: " + ", ".join(map(str, prompts))
    return Section("Fixed prompts over time", "grids", paragraph(f"{told}.") + pictures(shown))


def _scores(record: RunRecord) -> Section | None:
    if record.evaluation is None:
        if not len(record.metrics):
            return None
        why = "The sampled pictures were not compared with real ones. This does it:"
        return Section("Scores", "scores", missing(why, _evaluate(record)))
    body = table(("measure", "value ± standard error", "what it tells"), score_rows(record.evaluation))
    return Section("Scores", "scores", body + paragraph(f"{how_measured(record.evaluation)}"))


def _copies(record: RunRecord) -> Section | None:
    if record.evaluation is None:
        return None
    path, nearest = record.folder / NEAREST, record.evaluation.get("nearest")
    counts = record.evaluation.get("copies")
    if isinstance(counts, dict) and counts.get("skipped"):
        return Section("Copies", "copies", paragraph(f"Not counted: {counts['skipped']}."))
    if not path.is_file():
        why = "The sampled pictures were not laid beside their nearest training pictures. This does it:"
        return Section("Copies", "copies", missing(why, _evaluate(record)))
    told = "The sampled pictures that are most like a training picture, each above the training picture it is like."
    body = paragraph(told) + pictures([(path, "sampled above, trained on below")])
    rows = [each for each in nearest if isinstance(each, dict)] if isinstance(nearest, list) else []
    if rows:
        cells = [
            (
                str(row.get("caption") or ""),
                f"{row['correlation']:.3f}" if _is_number(row.get("correlation")) else "",
                str(row.get("training_picture", "")),
                str(row.get("seed", "")),
            )
            for row in rows[:MOST_LISTED]
        ]
        body += table(("sampled for", "correlation", "nearest training picture", "seed"), cells)
    return Section("Copies", "copies", body)


# ---- the rest


def _throughput(record: RunRecord) -> Section | None:
    metrics = record.metrics
    rates = metrics["pictures_per_second"]
    if not np.isfinite(rates).any():
        return None
    shown = [(f"{np.nanmedian(rates):,.0f}", "pictures per second, median")]
    waited, took = metrics["data_wait"], metrics.step_seconds
    both, body = np.isfinite(waited) & np.isfinite(took), ""
    if both.any() and took[both].sum() > 0:
        shown.append((f"{waited[both].sum() / took[both].sum():.1%}", "of the time waited for data"))
    if np.isfinite(metrics["memory_gib"]).any():
        shown.append((f"{np.nanmax(metrics['memory_gib']):.2f} GiB", "peak memory of the main process"))
    if len(shown) == 1:
        body = paragraph("Memory and the wait for data were not recorded by this run: newer releases do.")
    drawing = chart({"": curve(metrics["step"], rates)}, title="Pictures per second", across="step", up="", log=False)
    told = "Of all processes together, without saving and sampling."
    return Section("Throughput", "throughput", tiles(shown) + body + charts([(drawing, told)]))


def _data(record: RunRecord) -> Section | None:
    if record.data_summary is not None:
        return Section("Data", "data", verbatim(record.data_summary))
    if not record.data_path:
        return None
    why = "No summary of the data was kept with this run. This shows what the model sees of it:"
    return Section("Data", "data", missing(why, f"python scripts/inspect_data.py {shlex.quote(record.data_path)}"))


def _skipped_files(record: RunRecord) -> Section | None:
    if not record.skipped:
        return None
    told = f"{counted(len(record.skipped), 'file was', 'files were')} left out (data.on_error skip)"
    more = f"; the first {MOST_LISTED} are listed here, {SKIPPED} has all" if len(record.skipped) > MOST_LISTED else ""
    return Section(
        "Skipped files",
        "skipped",
        paragraph(f"{told}{more}.") + table(("kind", "path", "reason"), record.skipped[:MOST_LISTED]),
    )


def _settings(record: RunRecord) -> Section:
    return Section("Settings", "settings", folded("config.yaml, every setting", verbatim(record.config_text.strip())))


def _evaluate(record: RunRecord) -> str:
    data = shlex.quote(record.data_path) if record.data_path else "DIR"
    return f"python scripts/evaluate.py {record.shown_path} --data.path {data}"


def _spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)]


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _all_numbers(values: object, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(_is_number, values))
