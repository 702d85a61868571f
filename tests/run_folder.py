"""Run folders for the tests of what is written from them: with all that a run can leave, or as little as it may."""

import json
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

STEPS, BATCH = 1009, 13
TIMES = [0.1, 0.3, 0.5, 0.7, 0.9]
PROMPTS = ["a red heart", "<script>alert(1)</script>"]


def write_run(folder: Path, *, steps: int = STEPS) -> Path:
    """A run with every file and key; nothing in it was trained, but its curves have the shape of real ones."""
    write_bare_run(folder, steps=steps)
    for step in range(100, steps + 1, 100):
        write_picture(folder / f"samples/step-{step:06d}.png", side=29, seed=step)
    lines = [validation(step) for step in range(100, steps + 1, 100)]
    (folder / "logs/validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "evaluation.json").write_text(json.dumps(evaluation()), encoding="utf-8")
    write_picture(folder / "evaluation_nearest.png", side=31, seed=1)
    (folder / "data.txt").write_text(
        "1,327 pictures in pictures of <mine>, 16 x 16 grey\n127 pictures held out for validation\n", encoding="utf-8"
    )
    (folder / "skipped.tsv").write_text(
        "kind\tpath\treason\ntruncated\t/home/me/a&b.png\tends early\n", encoding="utf-8"
    )
    state = folder / f"checkpoints/step-{steps:06d}/state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"step": steps, "seconds": 3723.4}), encoding="utf-8")
    return folder


def write_bare_run(folder: Path, *, steps: int = STEPS, text: bool = True, all_keys: bool = True) -> Path:
    """A run with settings and metrics alone. all_keys: False for the keys that the first release wrote."""
    (folder / "logs").mkdir(parents=True)
    (folder / "samples").mkdir()
    config = {
        "data": {"path": "/home/me/pictures of <mine>", "resolution": 16},
        "text_encoder": {"class_path": "unet_attn.text_encoder.TextEncoder"} if text else None,
        "unet": {"in_channels": 1},
        "scheduler": {"class_path": "diffusers.FlowMatchEulerDiscreteScheduler"},
        "objective": {
            "prediction_type": "flow",
            "time_sampling": "logit_normal",
            "logit_mean": 0.5,
            "logit_std": 1.0,
            "loss_weighting": "none",
        },
        "train": {
            "output_dir": f"runs/{folder.name}",
            "seed": 3,
            "batch_size": BATCH,
            "max_steps": STEPS,
            "optimizer": "muon",
            "learning_rate": 1e-3,
            "muon_learning_rate": 0.02,
            "ema_decay": 0.999,
            "sample_prompts": PROMPTS if text else [],
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    with (folder / "logs/metrics.jsonl").open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(_metrics(step, all_keys=all_keys)) + "\n" for step in range(1, steps + 1))
    return folder


def write_picture(path: Path, *, side: int, seed: int = 0) -> Path:
    """A PNG of noise, which no format makes small."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def evaluation() -> dict[str, object]:
    """The figures of an evaluation with text, a judge and the nearest training pictures."""
    judge = {"judge": "runs/judge", "judge_record": {"held_out_agreement": 0.634}}
    judge |= {"real": _estimate(0.701, 0.029), "chance": 0.011, "held_out": 0.634}
    nearest = [
        {"caption": "<b>lock</b>", "seed": 17, "correlation": 0.991, "training_picture": "a/lock.png"},
        {"caption": "star", "seed": 5, "correlation": 0.9, "training_picture": "b/star.png"},
    ]
    return {
        "kid": 0.04277,
        "kid_error": 0.01079,
        "frechet": 160.12,
        "frechet_error": 11.77,
        "precision": 0.672,
        "precision_error": 0.028,
        "recall": 0.793,
        "recall_error": 0.028,
        "sampled_pictures": 257,
        "real_pictures": 251,
        "loss": {**_estimates(1.0), "on_training_data": False},
        "copies": {"rate": _estimate(0.066, 0.015), "rate_among_training": _estimate(0.125, 0.022)},
        "agreement": {"rate": _estimate(0.512, 0.034), "pictures": 257, **judge},
        "nearest": nearest,
        "extractor": "EfficientNet-Lite0",
        "resolution": 16,
        "steps": 25,
        "guidance_scale": 3.0,
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "seed": 0,
    }


def validation(step: int) -> dict[str, object]:
    """A line of validation.jsonl."""
    scale = 1 + 50 / step
    kinds = {"true": 1.0, "exchanged": 1.5, "empty": 1.2}
    by_time = {kind: [factor * scale * (0.1 + 0.3 * t) for t in TIMES] for kind, factor in kinds.items()}
    return {
        "step": step,
        "held_out": True,
        "pictures": 127,
        "times": TIMES,
        **_estimates(scale),
        "by_time": by_time,
    }


def _metrics(step: int, *, all_keys: bool) -> dict[str, object]:
    wave = 1 + 0.2 * np.sin(7.0 * step)
    line = {
        "step": step,
        "loss": None if step == 11 else float(wave * (0.1 + 2 / (1 + step / 20))),
        "lr": 1e-3 * min(1.0, step / 50),
        "pictures_seen": step * BATCH,
        "grad_norm": float(wave),
        "pictures_per_second": float(200 * wave),
    }
    if all_keys:
        # the last eighth is missing in every second step
        by_noise = [float((0.1 + n / 10) * (1 + 30 / step)) for n in range(7)] + [None if step % 2 else 0.9]
        line |= {"data_wait": 0.1 * BATCH / line["pictures_per_second"], "memory_gib": 1.25, "loss_by_noise": by_noise}
    return line


def _estimates(scale: float) -> dict[str, dict[str, float]]:
    values = {"true": 0.16, "exchanged": 0.37, "empty": 0.24, "gap_exchanged": 0.2129, "gap_empty": 0.0768}
    return {name: _estimate(scale * value, 0.02 * scale * value) for name, value in values.items()}


def _estimate(value: float, error: float) -> dict[str, float]:
    return {"value": value, "error": error}
