"""The peers of benchmark.py quality: they learn, are kept, and draw as their projects would."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from PIL import Image
from quality_data import pictures, quality_folder
from torch.testing import assert_close

from unet_attn.data import CaptionedImages, DataOptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quality_folder(tmp_path_factory.mktemp("quality"))


def test_a_class_is_the_first_word_or_the_name_of_a_folder(
    scripts: Callable[[str], ModuleType], folder: Path, tmp_path: Path
) -> None:
    peer = scripts("_peer")
    for name in ("red_panda", "red_fox"):
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name / "0.png")

    words = peer.Classes(pictures(folder))
    folders = peer.Classes(CaptionedImages(DataOptions(path=str(tmp_path), resolution=8), channels=1))

    assert words.names == ["arrow", "cloud", "file"] and words.of[:5].tolist() == [0, 1, 2, 0, 1]
    assert sorted(folders.names) == ["red fox", "red panda"] and sorted(folders.of.tolist()) == [0, 1]


@pytest.mark.parametrize("name", ["ddpm-s", "unet2d-s", "unet2d-text-s"])
def test_a_peer_learns_and_draws_from_its_average_or_as_it_is(
    scripts: Callable[[str], ModuleType], folder: Path, name: str
) -> None:
    peer_module, peers = scripts("_peer"), scripts("_peers")
    data = pictures(folder)
    torch.manual_seed(0)
    peer = peers.make_peer(name, data)
    before = [parameter.clone() for parameter in peer.parameters]
    batch = next(data.batches(7))

    times = peer_module.choose_layout(peer, batch, repeats=2)
    unchanged = [parameter.equal(was) for parameter, was in zip(peer.parameters, before, strict=True)]
    peer.start()
    losses = []
    for step in range(3):
        torch.manual_seed(1)  # the same noise and times, so that the losses can be compared
        losses.append(peer.loss(batch).item())
        peer.step(batch, step / 3)
    live = [parameter.clone() for parameter in peer.parameters]

    assert set(times) == {"contiguous", "channels_last"} and peer.layout in times and all(unchanged)
    assert peer.steps == 3 and losses[2] < losses[0]
    asked = peer_module.Asked([data.captions[n][0] for n in range(5)], peer.classes.of[:5])
    for sampler in peer.recipe.samplers.values():
        drawn = []
        for _ in range(2):
            torch.manual_seed(2)
            drawn.append(peer.sample(asked, sampler._replace(steps=2)))
        assert drawn[0].shape == (5, 1, 8, 8) and torch.isfinite(drawn[0]).all()
        assert_close(drawn[0], drawn[1])
    both = []
    for averaged in (True, False):
        torch.manual_seed(2)
        both.append(peer.sample(asked, peer.recipe.samplers["main"]._replace(steps=2, averaged=averaged)))
    assert not both[0].equal(both[1])
    # the averaged weights were only borrowed
    assert all(parameter.equal(was) for parameter, was in zip(peer.parameters, live, strict=True))


def test_guidance_changes_what_a_class_peer_draws(scripts: Callable[[str], ModuleType], folder: Path) -> None:
    data = pictures(folder)
    torch.manual_seed(0)
    peer = scripts("_peers").make_peer("unet2d-s", data)
    peer.start()
    asked = scripts("_peer").Asked(["cloud", "file"], torch.tensor([1, 2]))
    drawn = {}
    for guidance in (1.0, 3.0):
        torch.manual_seed(0)
        drawn[guidance] = peer.sample(asked, peer.recipe.samplers["main"]._replace(steps=2, guidance=guidance))

    assert not drawn[1.0].equal(drawn[3.0])
    # a caption that was dropped is the class of none, whatever the picture's own
    conditions = [peer.condition(asked._replace(captions=captions)) for captions in (["", "x"], ["x", ""])]
    assert [each["class_labels"].tolist() for each in conditions] == [[3, 2], [1, 3]]


@pytest.mark.parametrize("name", ["ddpm-s", "unet2d-s", "unet2d-text-s"])
def test_kept_weights_draw_the_same_pictures(
    scripts: Callable[[str], ModuleType], folder: Path, tmp_path: Path, name: str
) -> None:
    data, drawn = pictures(folder), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        peer = scripts("_peers").make_peer(name, data)
        peer.start()
        if seed == 0:
            for step in range(2):
                peer.step(next(data.batches(7)), step / 2)
            peer.save(tmp_path / "weights")
        else:
            peer.load(tmp_path / "weights")
        asked = scripts("_peer").Asked(["cloud", "file"], peer.classes.of[:2])
        for averaged in (True, False):
            torch.manual_seed(2)
            drawn.append(peer.sample(asked, peer.recipe.samplers["main"]._replace(steps=2, averaged=averaged)))

    assert drawn[0].equal(drawn[2]) and drawn[1].equal(drawn[3])


@pytest.mark.parametrize("name", ["main", "fast"])
def test_a_peers_guidance_does_not_lead_out_of_the_range_of_pictures(
    scripts: Callable[[str], ModuleType],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    torch.manual_seed(0)
    peer = scripts("_peers").make_peer("unet2d-s", pictures(folder))
    peer.start()
    means = []

    def overshooting(x: torch.Tensor, time: torch.Tensor, *, class_labels: torch.Tensor) -> SimpleNamespace:
        told = (class_labels < len(peer.classes.names)).float()[:, None, None, None]
        means.append(x.mean().item())
        return SimpleNamespace(sample=-told.expand_as(x))  # with guidance 3 a picture far above 1

    peer.unet.forward = overshooting
    asked = scripts("_peer").Asked(["cloud", "file"], torch.tensor([1, 2]))
    answer = peer.sample(asked, peer.recipe.samplers[name]._replace(steps=20))

    assert answer.abs().max() <= 1 + 1e-4
    # what was cut counts in the noise of the next step too: half-way it leads towards the picture, which is white
    assert means[len(means) // 2] > 0
