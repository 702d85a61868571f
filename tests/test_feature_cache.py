"""Cached features: by content, and never a reason for a wrong figure or a failure."""

import sqlite3
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from unet_attn.extractors import Extractor
from unet_attn.feature_cache import cached_features


class Counting(nn.Module):
    """Features by one matrix; counts the pictures that it was shown."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(scale * torch.linspace(-1, 1, 7 * 35).view(35, 7))
        self.seen = 0

    def forward(self, pictures: Tensor) -> Tensor:
        self.seen += len(pictures)
        return pictures.flatten(1) @ self.weight


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "unet-attn" / "features-1.sqlite"


def pictures(count: int = 11) -> Tensor:
    return torch.rand(count, 1, 5, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1


def seen(batch: Tensor, network: Counting, name: str = "counting", **options: int) -> int:
    """How many pictures had to be computed, once the features are known to be right."""
    before = network.seen
    features = cached_features(batch, Extractor(network, name), **options)
    torch.testing.assert_close(features, batch.flatten(1) @ network.weight.detach())
    return network.seen - before


def test_a_second_evaluation_computes_only_pictures_that_are_new_or_changed(file: Path) -> None:
    batch, network = pictures(), Counting()

    assert seen(batch, network, chunk=4) == 11
    assert seen(batch, network) == 0
    assert seen(batch[torch.arange(10, -1, -2)], network) == 0  # another order, another number
    changed = batch.clone()
    changed[3, 0, 2, 2] += 1 / 127.5
    assert seen(changed, network) == 1
    assert seen(batch, network) == 0  # what it was before is known still
    assert file.is_file()


def test_other_weights_another_name_and_another_shape_are_other_features(file: Path) -> None:
    batch = pictures()
    assert seen(batch, Counting()) == 11

    assert seen(batch, Counting(scale=2.0)) == 11
    assert seen(batch, Counting(), name="another") == 11
    assert seen(batch.reshape(11, 1, 7, 5), Counting()) == 11
    assert seen(batch, Counting()) == 0


def test_a_damaged_file_is_left_aside_and_begun_again(file: Path) -> None:
    batch, network = pictures(), Counting()
    seen(batch, network)

    file.write_bytes(b"no database at all" * 100)
    assert seen(batch, network) == 11
    assert seen(batch, network) == 0

    with sqlite3.connect(file) as database:  # one value, whose number would be believed
        key, value = database.execute("SELECT key, value FROM features").fetchone()
        database.execute("UPDATE features SET value = ? WHERE key = ?", (b"\0\0\0\0" + value[4:], key))
    database.close()
    assert seen(batch, network) == 11
    assert seen(batch, network) == 0


def test_a_cache_that_cannot_be_written_only_costs_time(file: Path) -> None:
    file.parent.write_text("where the folder should be")
    batch, network = pictures(), Counting()

    assert seen(batch, network) == 11
    assert seen(batch, network) == 11


def test_the_cache_keeps_the_newest_features_and_no_more(file: Path) -> None:
    batch, network = pictures(), Counting()

    seen(batch, network, most_rows=5)

    assert seen(batch[6:], network) == 0
    assert seen(batch[:6], network, most_rows=5) == 6
    with sqlite3.connect(file) as database:
        assert database.execute("SELECT count(*) FROM features").fetchone() == (5,)
    database.close()


def test_no_pictures_are_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="no pictures"):
        cached_features([], Extractor(Counting(), "counting"))
