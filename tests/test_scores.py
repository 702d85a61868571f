"""What a report and a model card say of the figures of an evaluation."""

from typing import Any

import pytest

from unet_attn.scores import score_rows


def row(name: str, evaluation: dict[str, Any]) -> str:
    """What the row of this name tells."""
    return {score.name: score.tells for score in score_rows(evaluation)}[name]


def estimate(value: float, error: float) -> dict[str, float]:
    return {"value": value, "error": error}


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"on_training_data": True, "trained_on": 67}, ", on training data"),
        ({"on_training_data": False, "trained_on": 0}, ", on pictures that training never saw"),
        ({"on_training_data": None, "trained_on": 13}, ", on 67 pictures, 13 of which were trained on"),
        ({"on_training_data": None, "trained_on": None}, ""),
        ({}, ""),
    ],
)
def test_the_loss_is_called_what_is_known_of_its_pictures(known: dict[str, Any], said: str) -> None:
    loss = {"true": estimate(0.2, 0.01), "pictures": 67} | known

    assert row("loss", {"loss": loss}) == f"how well noise is removed{said}"


def test_the_agreement_stands_beside_that_of_the_real_pictures_of_its_captions() -> None:
    agreement = {
        "rate": estimate(0.5, 0.03),
        "real": estimate(0.816, 0.024),
        "chance": 0.036,
        "held_out": 0.634,
        "judge_record": {"held_out_agreement": 0.25},
    }
    told = "how often a judge finds the caption among 100"
    beside = "; of the real pictures of these captions 0.816 ± 0.024"

    assert row("caption agreement", {"agreement": agreement}) == (
        f"{told}{beside} (0.634 of pictures new to the judge), chance 0.036"
    )
    agreement["held_out"] = None
    assert row("caption agreement", {"agreement": agreement}) == f"{told}{beside}, chance 0.036"
    del agreement["real"]  # as older releases wrote it: what the judge found elsewhere is no ceiling here
    assert row("caption agreement", {"agreement": agreement}) == told


def test_near_copies_stand_beside_those_among_the_training_pictures_with_the_excess_and_its_error() -> None:
    copies = {"rate": estimate(0.066, 0.016), "rate_among_training": estimate(0.125, 0.021)}
    repeats = "share that repeats a training picture; of the training pictures themselves 0.125 ± 0.021"

    assert row("near copies", {"copies": copies}) == repeats
    copies["excess"] = estimate(-0.059, 0.026)
    assert row("near copies", {"copies": copies}) == f"{repeats}, excess -0.059 ± 0.026"
