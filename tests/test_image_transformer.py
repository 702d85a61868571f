"""The image transformer: what its tokens depend on, the weights it shows, what it refuses."""

import pytest
import torch
from torch.testing import assert_close

from unet_attn.image_transformer import ImageTransformer


def pictures(count: int, channels: int, side: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def small(depth: int = 3) -> ImageTransformer:
    torch.manual_seed(0)
    return ImageTransformer(20, 3, depth=depth).eval()


def test_the_smallest_size_is_48_wide_with_four_heads_of_12() -> None:
    eye = ImageTransformer()
    attention = eye.layers[0].attention

    assert (eye.dim, attention.heads, attention.to_q.out_features // attention.heads) == (48, 4, 12)
    assert eye.to_tokens.in_features == 48  # a patch of 4 x 4 pixels in three colours
    assert eye(pictures(2, 3, 32)).shape == (2, 64, 48)


def test_without_layers_a_token_is_its_own_patch_in_reading_order() -> None:
    eye = small(depth=0)
    before = pictures(1, 3, 20)
    after = before.clone()
    after[:, :, 4:8, 12:16] *= -1  # row 1, column 3 of the 5 x 5 patches

    changed = (eye(before) != eye(after)).any(dim=-1)[0]

    assert changed.nonzero().flatten().tolist() == [1 * 5 + 3]


def test_with_layers_every_token_sees_the_whole_picture() -> None:
    eye = small()
    before = pictures(1, 3, 20)
    after = before.clone()
    after[:, :, :4, :4] *= -1

    assert (eye(before) != eye(after)).any(dim=-1).all()


def test_patches_that_are_exchanged_are_told_apart_by_their_positions() -> None:
    eye = small()
    picture = pictures(1, 3, 20)

    assert not torch.allclose(eye(picture).mean(dim=1), eye(picture.flip(-1)).mean(dim=1), atol=1e-3)


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_the_weights_shown_are_those_that_the_layer_mixes_with(layer: int) -> None:
    eye = small()
    x = eye._embed(pictures(2, 3, 20))
    for each in eye.layers[: layer % 3]:
        x = each(x)
    attention = eye.layers[layer].attention
    normed = eye.layers[layer].attention_norm(x)

    weights = eye.attention_weights(pictures(2, 3, 20), layer=layer)

    assert weights.shape == (2, 4, 25, 25)
    assert_close(weights.sum(dim=-1), torch.ones(2, 4, 25))
    value = attention.to_v(normed).unflatten(-1, (4, 12)).transpose(1, 2)
    mixed = (weights @ value).transpose(1, 2).flatten(2)
    assert_close(attention.to_out(mixed), attention(normed, normed, normed), atol=1e-5, rtol=0)


def test_gradients_reach_every_weight() -> None:
    eye = small()
    eye(pictures(2, 3, 20)).square().sum().backward()

    # a key's bias adds the same to all scores of a query, which the softmax takes away again
    silent = [name for name, weight in eye.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert [name for name in silent if not name.endswith("to_k.bias")] == []


def test_what_does_not_fit_is_refused_with_the_sizes() -> None:
    with pytest.raises(ValueError, match="patches of 4 pixels do not divide a picture of 22"):
        ImageTransformer(22)
    with pytest.raises(ValueError, match="a width of 50 does not divide into 4 heads"):
        ImageTransformer(20, dim=50)
    with pytest.raises(ValueError, match=r"pictures must be \(3, 20, 20\) \(C, H, W\), got \(1, 20, 20\)"):
        small()(pictures(1, 1, 20))
