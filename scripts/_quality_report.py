"""What `benchmark.py quality` shows: two Markdown tables, and charts of the scores over the minutes of training."""

import re
from collections.abc import Mapping
from typing import Any

from unet_attn.charts import Line, chart
from unet_attn.scores import as_text

Result = Mapping[str, Any]
Results = Mapping[str, Result]


def tables(results: Results) -> str:
    """The entries by their best sampler, and every sampler at the end."""
    first = next(iter(results.values()))
    training, drawing = first["settings"]["training"], first["settings"]["drawing"]
    head = (
        f"{training['minutes']:g} minutes of training each, seed {training['seed']}; {first['machine']}. At the end "
        f"{drawing['num_pictures']} pictures, before that {drawing['num_between']}.\n"
    )
    return "\n".join([head, by_entry(results), "Every sampler at the end:\n", by_sampler(results)])


def by_entry(results: Results) -> str:
    parts = [
        f"KID x 1000 at {100 * moment:g} %"
        for moment in next(iter(results.values()))["settings"]["training"]["moments"]
    ]
    columns = ["entry", "parameters, M", "pictures/s in training", "steps", *parts]
    columns += ["the best sampler's KID x 1000", "Frechet distance"]
    columns += ["caption agreement", "class agreement", "pictures/s in sampling", "peak in training, MiB", "layout"]
    rows = []
    for name, result in results.items():
        best = best_take(result)
        rows.append(
            [
                name,
                f"{result['parameters'] / 1e6:.1f}",
                f"{result['pictures_per_second']:.1f}",
                f"{result['steps']:,}",
                *kid_over_time(result),
                kid_text(best),
                as_text(best["frechet"], best["frechet_error"], digits=1),
                agreement(best, "agreement"),
                agreement(best, "class_agreement"),
                f"{best['pictures_per_second']:.1f}",
                f"{result['mib']['training']:.0f}",
                result["recipe"].get("layout", "channels_last"),
            ]
        )
    return markdown(columns, rows)


def by_sampler(results: Results) -> str:
    columns = ["entry", "sampler", "steps", "guidance", "KID x 1000", "Frechet distance", "caption agreement"]
    columns += ["class agreement", "pictures/s"]
    rows = [
        [
            name,
            f"{take['sampler']}: {take['scheduler']}",
            str(take["steps"]),
            f"{take['guidance']:g}",
            kid_text(take),
            as_text(take["frechet"], take["frechet_error"], digits=1),
            agreement(take, "agreement"),
            agreement(take, "class_agreement"),
            f"{take['pictures_per_second']:.1f}",
        ]
        for name, result in results.items()
        for take in at_end(result)
    ]
    return markdown(columns, rows)


def at_end(result: Result) -> list[Mapping[str, Any]]:
    return [take for take in result["takes"] if take["moment"] == 1]


def best_take(result: Result) -> Mapping[str, Any]:
    """What was drawn at the end by the sampler that came closest."""
    return min(at_end(result), key=lambda take: take["kid"])


def kid_over_time(result: Result) -> list[str]:
    """KID at each moment, by the main sampler throughout."""
    moments = result["settings"]["training"]["moments"]
    takes = {take["moment"]: take for take in result["takes"] if take["sampler"] == "main"}
    return [kid_text(takes[moment]) if moment in takes else "" for moment in moments]


def kid_text(take: Mapping[str, Any]) -> str:
    return as_text(take["kid"], take["kid_error"], factor=1000, digits=1)


def agreement(take: Mapping[str, Any], name: str) -> str:
    found = take.get(name)
    return "" if found is None else as_text(found["value"], found["error"])


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def charts(results: Results) -> dict[str, str]:
    """File names and SVGs: of each family the entry that ends closest, by its main sampler."""
    best: dict[str, str] = {}
    for name in results:
        family = re.sub("-[lms]$", "", name)
        if family not in best or last(results[name])["kid"] < last(results[best[family]])["kid"]:
            best[family] = name
    drawn = {name: [take for take in results[name]["takes"] if take["sampler"] == "main"] for name in best.values()}
    kid = {
        name: Line(
            [take["minutes"] for take in takes],
            [1000 * take["kid"] for take in takes],
            errors=[1000 * take["kid_error"] for take in takes],
        )
        for name, takes in drawn.items()
    }
    across = "minutes of training"
    found = {"kid.svg": chart(kid, title="Distance from real pictures", across=across, up="KID x 1000", log=True)}
    if all("agreement" in take for takes in drawn.values() for take in takes):
        lines = {
            name: Line(
                [take["minutes"] for take in takes],
                [take["agreement"]["value"] for take in takes],
                errors=[take["agreement"]["error"] for take in takes],
            )
            for name, takes in drawn.items()
        }
        found["agreement.svg"] = chart(lines, title="Pictures that fit their captions", across=across, up="share")
    return found


def last(result: Result) -> Mapping[str, Any]:
    """What the main sampler drew at the end."""
    return next(take for take in at_end(result) if take["sampler"] == "main")
