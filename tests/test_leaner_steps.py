"""What makes a step faster or leaner must not change what it computes: compile, checkpointing, mixed precision."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from test_training import assert_same_run, metrics, small_model, trainer_for
from test_watching import pictures  # noqa: F401  a fixture

from unet_attn.training import Trainer


def test_gradient_checkpointing_gives_the_same_run_to_the_bit(pictures: Path, tmp_path: Path) -> None:  # noqa: F811
    trainer_for(pictures, tmp_path / "plain", max_steps=3).run()
    lean = trainer_for(pictures, tmp_path / "lean", max_steps=3, gradient_checkpointing=True)
    assert lean.model.unet.is_gradient_checkpointing
    lean.run()

    assert_same_run(tmp_path / "lean", tmp_path / "plain", 3)


def test_gradient_checkpointing_keeps_fewer_activations(pictures: Path, tmp_path: Path) -> None:  # noqa: F811
    kept = {}
    for name, lean in (("plain", False), ("lean", True)):
        trainer = trainer_for(pictures, tmp_path / name, gradient_checkpointing=lean)
        sizes: list[int] = []

        def pack(tensor: torch.Tensor, into: list[int] = sizes) -> torch.Tensor:
            into.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trainer.model(torch.zeros(4, 1, 8, 8), torch.zeros(4), ["a"] * 4)
        kept[name] = sum(sizes)

    assert kept["lean"] < 0.6 * kept["plain"]


def test_bfloat16_keeps_weights_averages_and_optimizer_in_float32(pictures: Path, tmp_path: Path) -> None:  # noqa: F811
    trainer_for(pictures, tmp_path / "full", max_steps=3).run()
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        plain = trainer_for(pictures, tmp_path / "half", max_steps=3)
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        half = Trainer(
            small_model(plain.data), plain.objective, plain.data, plain.options, accelerator, config="a: 1\n"
        )
        half.run()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)

    folder = tmp_path / "half" / "checkpoints" / "step-000003"
    for name in ("model", "ema", "optimizer"):
        assert {value.dtype for value in load_file(folder / f"{name}.safetensors").values()} == {torch.float32}
    losses = [[line["loss"] for line in metrics(tmp_path / run)] for run in ("half", "full")]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_and_the_names_of_an_eager_one(pictures: Path, tmp_path: Path) -> None:  # noqa: F811
    def without_dropout(name: str, **options: object) -> Trainer:
        trainer = trainer_for(pictures, tmp_path / name, max_steps=4, **options)
        trainer.model.unet.conv_in[1].p = 0.0  # a compiled network draws its dropout otherwise
        return trainer

    without_dropout("eager").run()
    without_dropout("compiled", compile=True).run()

    losses = [[line["loss"] for line in metrics(tmp_path / run)] for run in ("compiled", "eager")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    saved = [
        sorted(load_file(tmp_path / run / "checkpoints" / "step-000004" / "model.safetensors"))
        for run in ("compiled", "eager")
    ]
    assert saved[0] == saved[1]
