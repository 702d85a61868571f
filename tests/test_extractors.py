"""The networks of the distances: what they see, the standard Inception from a file, and what they refuse."""

import pickle
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from unet_attn.extractors import (
    EFFICIENTNET_SIZE,
    EXTRACTORS,
    INCEPTION_FILES,
    EfficientNetFeatures,
    ExtractorMissingError,
    Given,
    InceptionFeatures,
    extract_features,
    make_extractor,
    resized,
    to_bytes,
    weights_digest,
)


def coloured(count: int, *, channels: int = 3) -> Tensor:
    """Pictures (count, channels, 11, 13) of 8 bits, in [-1, 1]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, 11, 13), generator=generator) / 127.5 - 1


@pytest.fixture(scope="module")
def efficientnet() -> EfficientNetFeatures:
    return EfficientNetFeatures()


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the right shapes, drawn at random, as torch-fidelity's file has them."""
    networks = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    path = tmp_path_factory.mktemp("inception") / INCEPTION_FILES[0]
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:  # else it would fetch the real ones
        patch.setattr(networks, "load_state_dict_from_url", lambda url, progress: {})
        patch.setattr(networks.FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        torch.save(networks.FeatureExtractorInceptionV3("random", ["2048"]).state_dict(), path)
    return path


def test_features_do_not_depend_on_the_batch(efficientnet: EfficientNetFeatures) -> None:
    pictures = coloured(7)

    together = extract_features(pictures, efficientnet, batch_size=64)
    apart = extract_features(list(pictures), efficientnet, batch_size=3)

    assert together.shape == (7, 1280)
    assert_close(together, apart, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="no pictures"):
        extract_features([], nn.Identity())


def test_the_efficientnet_sees_what_its_classifier_was_trained_on(efficientnet: EfficientNetFeatures) -> None:
    bytes_of_pictures = (resized(coloured(3), EFFICIENTNET_SIZE) + 1) * 127.5
    network = efficientnet.network

    expected = network._avg_pooling(network.extract_features((bytes_of_pictures - 127) / 128))

    assert_close(efficientnet(coloured(3)), expected.flatten(1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 31, 37), (3, 151, 97), (3, 128, 128)])
def test_pictures_of_any_size_and_grey_ones_come_to_the_networks_size(channels: int, height: int, width: int) -> None:
    pictures = torch.full((2, channels, height, width), -1.0)
    pictures[:, :, : height // 2] = 1.0

    fitted = resized(pictures, 128)

    assert fitted.shape == (2, 3, 128, 128)
    assert fitted.min() == -1 and fitted.max() == 1  # no overshoot beside the edge
    assert torch.equal(fitted[:, 0], fitted[:, 2])


def test_pictures_come_back_to_the_bytes_that_they_were() -> None:
    every = torch.arange(256)

    assert torch.equal(to_bytes(every / 127.5 - 1), every.to(torch.uint8))
    assert to_bytes(torch.tensor([-1.2, 1.2])).tolist() == [0, 255]


def test_inception_features_are_those_of_others_who_use_its_weights(inception_file: Path) -> None:
    theirs = import_module("torchmetrics.image.fid").NoTrainInceptionV3(
        "inception-v3-compat", ["2048"], str(inception_file), antialias=False
    )
    grey = coloured(2, channels=1)

    features = extract_features(grey, InceptionFeatures(inception_file))

    colour = ((grey + 1) * 127.5).round().to(torch.uint8).repeat(1, 3, 1, 1)
    assert features.shape == (2, 2048) and features.std(dim=0).max() > 0
    assert_close(features, theirs._torch_fidelity_forward(colour)[0], atol=1e-5, rtol=1e-4)


def test_inception_is_found_in_torch_hubs_folder_and_other_weights_are_said_to_be_so(
    inception_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"

    with pytest.raises(ExtractorMissingError) as missing:
        make_extractor("inception")
    folder.mkdir(parents=True)
    (folder / INCEPTION_FILES[1]).symlink_to(inception_file)

    assert f"{INCEPTION_FILES[0]}: put it into {folder}, or say where it is by --inception_weights" in str(
        missing.value
    )
    assert ", NOT its standard weights (SHA-256 " in make_extractor("inception").name
    monkeypatch.setattr("unet_attn.extractors.INCEPTION_DIGEST", _sha256(inception_file))
    assert make_extractor("inception").name.endswith("TensorFlow 1's resize")


def _sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Executed:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_a_file_that_is_not_inceptions_weights_is_refused_and_nothing_in_it_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch_fidelity")
    trap, text, other = tmp_path / "trap.pth", tmp_path / "text.pth", tmp_path / "other.pth"
    trap.write_bytes(pickle.dumps(_Executed(tmp_path / "ran"), protocol=2))
    text.write_text("<html>not found</html>")
    torch.save({"weight": torch.zeros(3)}, other)

    for path in (trap, text, other):
        with pytest.raises(ValueError, match=f"^{path} does not hold the weights of the standard Inception$"):
            InceptionFeatures(path)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ExtractorMissingError, match=f"^there is no file {tmp_path}/absent with Inception's weights"):
        InceptionFeatures(tmp_path / "absent")


@pytest.mark.parametrize(
    ("kind", "package", "command"),
    [
        ("efficientnet", "efficientnet_lite_pytorch", "pip install --no-deps efficientnet-lite-pytorch"),
        ("inception", "torch_fidelity.feature_extractor_inceptionv3", "pip install torch-fidelity"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, package: str, command: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(ExtractorMissingError, match=command) as caught:
        make_extractor(kind)

    assert "\n" not in str(caught.value)


def test_an_extractor_is_chosen_by_name_and_a_judge_must_be_given() -> None:
    with pytest.raises(ValueError, match=f"^there are no features 'vgg': choose from {', '.join(EXTRACTORS)}$"):
        make_extractor("vgg")
    with pytest.raises(ValueError, match="need a judge of this data"):
        make_extractor("judge", Given())


def test_the_digest_of_weights_tells_values_and_names_apart() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    digest = weights_digest(layer)

    assert weights_digest(layer) == digest and len(digest) == 32
    assert weights_digest(nn.ModuleDict({"a": layer})) != digest
    with torch.no_grad():
        layer[0].weight[1, 2] += 1e-6
    assert weights_digest(layer) != digest
