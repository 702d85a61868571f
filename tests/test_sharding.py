"""Sharded weights, with torch's own fully_shard over two real processes: trained, gathered, saved, loaded."""

from pathlib import Path

import processes
import pytest
import torch
from sharded_model import CAPTIONS, STEPS, shard_train_save_and_load, tiny_model
from torch import Tensor

from unet_attn.checkpoint import load_checkpoint
from unet_attn.ema import trainable
from unet_attn.sharding import clean_name, copy_whole, gathered, is_sharded, plain_copy, sharded_like, whole
from unet_attn.unet import AttnUNet2D

Tensors = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    processes.run_group(shard_train_save_and_load, folder)
    return folder


@pytest.fixture(scope="module")
def sharded(folder: Path) -> Tensors:
    return load_checkpoint(folder / "checkpoints" / f"step-{STEPS:06d}").tensors


@pytest.fixture(scope="module")
def one_piece(folder: Path) -> Tensors:
    return load_checkpoint(folder / "one piece" / f"step-{STEPS:06d}").tensors


@pytest.mark.parametrize("kind", ["model", "ema", "optimizer", "norms"])
def test_two_steps_of_sharded_training_are_those_of_one_piece(sharded: Tensors, one_piece: Tensors, kind: str) -> None:
    assert sharded[kind].keys() == one_piece[kind].keys()
    for name, value in one_piece[kind].items():
        torch.testing.assert_close(
            sharded[kind][name], value, rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_gathered_names_are_those_of_the_bare_model(sharded: Tensors) -> None:
    names = trainable(tiny_model(0)).keys()

    assert sharded["model"].keys() == names
    assert sharded["ema"].keys() == names


def test_the_steps_changed_most_weights_by_far_more_than_the_tolerance(one_piece: Tensors) -> None:
    start = trainable(tiny_model(0))
    moved = sorted((one_piece["model"][name] - start[name]).abs().max().item() for name in start)

    assert moved[len(moved) // 2] > 1e-3


def test_a_sharded_checkpoint_fills_sharded_and_plain_models_alike(folder: Path, sharded: Tensors) -> None:
    loaded = load_checkpoint(folder / "loaded" / "step-000000").tensors

    for kind in ("sharded", "plain", "copy"):
        assert loaded[kind].keys() == sharded["model"].keys()
        assert [name for name, value in loaded[kind].items() if not torch.equal(value, sharded["model"][name])] == []


def test_the_copy_of_a_sharded_model_is_published_as_any_other(folder: Path, sharded: Tensors) -> None:
    unet = AttnUNet2D.from_pretrained(folder / "published" / "unet")

    assert all(torch.equal(value, sharded["model"][f"unet.{name}"]) for name, value in unet.state_dict().items())


def test_plain_tensors_pass_through_and_are_never_copied() -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(5)}

    assert not is_sharded(tensors.values())
    assert whole(tensors["a"]) is tensors["a"]
    for keep in (True, False):
        assert all(gathered(tensors, keep=keep)[name] is tensors[name] for name in tensors)


def test_a_whole_tensor_is_copied_into_the_memory_layout_that_is_there() -> None:
    target = torch.nn.Parameter(torch.empty(5, 7, 3, 3).to(memory_format=torch.channels_last))
    full = torch.randn(5, 7, 3, 3)
    copy_whole({"a": target}, {"a": full, "b": full})

    assert sharded_like(full, target) is full
    assert target.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(target, full)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"expected a tensor of shape \(5, 2\), got \(5, 1\)"):
        copy_whole({"a": torch.empty(5, 2)}, {"a": torch.empty(5, 1)})  # copy_ alone would repeat the column


@pytest.mark.parametrize(
    "wrapped",
    [
        "unet.conv_in.weight",
        "module.unet.conv_in.weight",
        "_orig_mod.module.unet.conv_in.weight",
        "module._orig_mod.unet._checkpoint_wrapped_module.conv_in.weight",
        "_fsdp_wrapped_module.unet._fsdp_wrapped_module._orig_mod.conv_in.weight",
    ],
)
def test_wrappers_leave_no_trace_in_a_name(wrapped: str) -> None:
    assert clean_name(wrapped) == "unet.conv_in.weight"


def test_the_names_of_real_wrappers_are_cleaned() -> None:
    model = tiny_model(0)
    names = list(dict(model.named_parameters()))
    model.unet = torch.compile(model.unet)
    wrapped = torch.nn.ModuleDict({"module": model})

    assert [clean_name(name) for name, _ in wrapped.named_parameters()] == names


def test_a_plain_copy_shares_nothing_with_the_model_and_computes_the_same() -> None:
    model = tiny_model(0).train()
    copy = plain_copy(model)
    with torch.no_grad():
        expected, _ = model.eval()(torch.ones(6, 1, 8, 8), torch.zeros(6), CAPTIONS)
        for parameter in model.parameters():
            parameter.zero_()

    assert not copy.training
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    torch.testing.assert_close(copy(torch.ones(6, 1, 8, 8), torch.zeros(6), CAPTIONS)[0], expected)
