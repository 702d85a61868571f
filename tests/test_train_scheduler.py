"""What scripts/train.py says of a scheduler's settings with which none can be made, or none that trains."""

from pathlib import Path

import pytest
from tiny_config import write_config


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("DDIM", {"beta_schedule": "linea"}, "scheduler.init_args: DDIMScheduler has no beta_schedule 'linea'"),
        ("DDPM", {"beta_schedule": "linea"}, "beta_schedule"),
        ("DDIM", {"num_train_timesteps": 0}, "scheduler.init_args.num_train_timesteps must be at least 1, got 0"),
        ("DDPM", {"num_train_timesteps": -5}, "scheduler.init_args.num_train_timesteps must be at least 1, got -5"),
        ("FlowMatchEulerDiscrete", {"num_train_timesteps": 0}, "num_train_timesteps must be at least 1, got 0"),
        ("DDIM", {"num_train_timesteps": "null"}, "num_train_timesteps must be at least 1, got None"),
        (
            "DDIM",
            {"num_train_timesteps": 10**15},
            "scheduler.init_args {'num_train_timesteps': 1000000000000000} make no",
        ),
        (
            "DDIM",
            {"beta_start": -1, "beta_schedule": "scaled_linear"},
            "scheduler.init_args {'beta_start': -1.0, 'beta_schedule': 'scaled_linear'}",
        ),
        ("DDIM", {"beta_start": "null"}, "{'beta_start': None} make no diffusers.DDIMScheduler"),
        ("DDIM", {"trained_betas": "[]"}, "trained_betas must be as many"),
        ("DDIM", {"trained_betas": "[0.1, 0.2]"}, "trained_betas must be as many"),
        ("DDPM", {"rescale_betas_zero_snr": True, "trained_betas": "[]"}, "{'trained_betas': [], 'rescale_betas_zero"),
        ("DDIM", {"timestep_spacing": "linspace"}, "DDIMScheduler with timestep_spacing linspace misses"),
        ("DDIM", {"beta_end": 2.0}, "DDIMScheduler has betas outside 0..1: see its beta_start, beta_end"),
    ],
)
def test_what_is_wrong_with_the_scheduler_is_one_line(
    scripts, tmp_path: Path, capsys, monkeypatch, name: str, settings: dict[str, object], message: str
) -> None:
    script = scripts("train")
    monkeypatch.setattr(script, "open_data", None)  # calling it would raise a TypeError
    options = ["--scheduler", f"diffusers.{name}Scheduler"]
    options += [f"--scheduler.init_args.{key}={value}" for key, value in settings.items()]
    if not name.startswith("Flow"):
        options += ["--objective.prediction_type", "epsilon"]

    assert script.main(["--config", str(write_config(tmp_path, max_steps=1)), *options]) == 2

    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "run").exists()


def test_no_scheduler_is_one_line(scripts, tmp_path: Path, capsys) -> None:
    config = write_config(tmp_path, max_steps=1)
    assert scripts("train").main(["--config", str(config), "--scheduler", "null"]) == 2
    assert capsys.readouterr().err.startswith("error: scheduler must have a class_path")
