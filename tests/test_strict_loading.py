"""`from_pretrained` of our networks: what is not exactly the model's is an error that names it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import ModelMixin
from pipeline_parts import text_parts, tiny_unet
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig

from unet_attn.text_encoder import PretrainedText

BERT = BertConfig(vocab_size=31, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
# a network, and one of its weights
NETWORKS = {
    "unet": (tiny_unet, "conv_in.bias"),
    "text encoder": (lambda: text_parts()[0], "norm.weight"),
    "pretrained": (lambda: PretrainedText("", BERT.to_dict()), "model.pooler.dense.bias"),
}
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def saved(network: ModelMixin, folder: Path, change: Change) -> Path:
    network.save_pretrained(folder)
    path = folder / "diffusion_pytorch_model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_weights_that_are_missing_left_over_or_of_another_shape_are_refused_by_name(
    name: str, lean: bool, tmp_path: Path
) -> None:
    make, key = NETWORKS[name]
    network = make()
    changes = {
        "missing .* and \\d+ more; unexpected module\\.": lambda weights: {
            f"module.{k}": v for k, v in weights.items()
        },
        f"missing {key}$": lambda weights: {k: v for k, v in weights.items() if k != key},
        "unexpected other$": lambda weights: weights | {"other": torch.zeros(2)},
        f"of another shape {key}$": lambda weights: weights | {key: torch.zeros(5)},
    }
    for message, change in changes.items():
        folder = saved(network, tmp_path, change)
        with pytest.raises(ValueError, match=f"not those of this {type(network).__name__}: {message}"):
            type(network).from_pretrained(folder, low_cpu_mem_usage=lean)


def test_the_loading_report_is_given_to_who_asks_for_it(tmp_path: Path) -> None:
    unet = tiny_unet()
    folder = saved(unet, tmp_path, lambda weights: weights)

    loaded, report = type(unet).from_pretrained(folder, output_loading_info=True)

    assert torch.equal(loaded.conv_in.weight, unet.conv_in.weight)
    assert report["missing_keys"] == report["unexpected_keys"] == report["mismatched_keys"] == []
