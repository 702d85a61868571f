"""The U-Net's shapes, its text and masks, what it refuses, and its use in diffusers' own pipelines."""

import pytest
import torch
from diffusers import DDIMPipeline, DDIMScheduler, DDPMPipeline, DDPMScheduler
from torch.testing import assert_close

from unet_attn.unet import AttnUNet2D


def tiny_unet(**options) -> AttnUNet2D:
    torch.manual_seed(0)
    defaults = {
        "sample_size": 16,
        "in_channels": 2,
        "out_channels": 2,
        "block_channels": (8, 16),
        "attention_levels": (1,),
        "dim_head": 8,
    }
    unet = AttnUNet2D(**{**defaults, **options})
    # blocks and output start at zero, which would make every test below true of nothing
    for parameter in unet.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return unet.eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"patch_size": 2},
        {"block_channels": (8,), "attention_levels": (0,)},
        {"block_channels": (8, 16, 24), "attention_levels": (1, 2), "layers_per_block": 2},
        {"attention_levels": ()},
        {"in_channels": 3, "out_channels": 1},
    ],
)
def test_output_has_the_size_of_the_input_for_every_shape_of_network(options: dict) -> None:
    unet = tiny_unet(**options)
    for height, width in ((16, 16), (8, 24)):
        sample = torch.randn(2, unet.config.in_channels, height, width)
        assert unet(sample, torch.tensor([3, 700])).sample.shape == (2, unet.config.out_channels, height, width)


def test_a_fresh_network_predicts_zero() -> None:
    unet = AttnUNet2D(sample_size=8, block_channels=(8, 16), attention_levels=(1,), dim_head=8)
    assert (unet(torch.randn(2, 3, 8, 8), 5).sample == 0).all()


def test_x_prediction_answers_with_the_velocity_to_the_picture_of_the_last_layer() -> None:
    plain, predicting = tiny_unet(context_dim=5), tiny_unet(context_dim=5, x_prediction=True)
    assert plain.state_dict().keys() == predicting.state_dict().keys()
    predicting.load_state_dict(plain.state_dict())
    sample, text = torch.randn(3, 2, 16, 8), torch.randn(3, 7, 5)
    for timestep in (torch.tensor([7.0, 250.0, 1000.0]), 431, torch.tensor(431)):
        time = (torch.as_tensor(timestep) / 1000).reshape(-1, 1, 1, 1)
        clean = plain(sample, timestep, text).sample
        assert_close(predicting(sample, timestep, text).sample, (sample - clean) / time)
    assert predicting(sample, 0, text).sample.isfinite().all()


@pytest.mark.parametrize("size", [(17, 16), (16, 23), (1, 8), (20, 18), (0, 16), (16, 0)])
def test_a_size_that_does_not_fit_is_refused_before_any_compute(size: tuple[int, int]) -> None:
    unet = tiny_unet(patch_size=2)
    unet.conv_in.register_forward_hook(lambda *_: pytest.fail("computed before checking"))
    with pytest.raises(ValueError, match="must be a positive multiple of 4, got"):
        unet(torch.zeros(1, 2, *size), 0)


def test_the_smallest_and_odd_multiples_of_the_factor_work() -> None:
    unet = tiny_unet(patch_size=2)
    assert unet.downsample_factor == 4
    for size in ((4, 4), (12, 20), (4, 28)):
        assert unet(torch.zeros(1, 2, *size), 0).sample.shape[2:] == size


def test_attention_sits_only_at_the_levels_that_the_config_names() -> None:
    unet = tiny_unet(block_channels=(8, 16, 24), attention_levels=(1,), context_dim=5)
    attending = {
        name.rsplit(".", 2)[0] for name, _ in unet.named_modules() if name.endswith("self_attention.attention")
    }
    assert attending == {"down.8x8.0", "up.8x8.0", "up.8x8.1"}
    crossing = [name for name, _ in unet.named_modules() if name.endswith("cross_attention.attention")]
    assert len(crossing) == len(attending)


def test_the_timestep_may_be_a_number_a_scalar_or_one_per_sample() -> None:
    unet, sample = tiny_unet(), torch.randn(2, 2, 8, 8)
    outputs = [unet(sample, t).sample for t in (7, 7.0, torch.tensor(7), torch.tensor([7, 7]), torch.tensor([7.0]))]
    for output in outputs[1:]:
        assert_close(output, outputs[0])
    assert not torch.allclose(unet(sample, 800).sample, outputs[0])
    assert isinstance(unet(sample, 7, return_dict=False), tuple)


def test_the_text_is_used_and_its_padding_is_not() -> None:
    unet, sample = tiny_unet(context_dim=5), torch.randn(2, 2, 16, 16)
    text, mask = torch.randn(2, 7, 5), torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    output = unet(sample, 10, text, mask).sample

    longer = torch.cat([text, torch.randn(2, 70, 5)], 1)
    padded = unet(sample, 10, longer, torch.cat([mask, torch.zeros(2, 70, dtype=mask.dtype)], 1)).sample
    assert_close(padded, output, atol=1e-5, rtol=1e-5)
    alone = unet(sample[1:], 10, text[1:, :3], None).sample
    assert_close(alone, output[1:], atol=1e-5, rtol=1e-5)

    other = unet(sample, 10, text.flip(0), mask.flip(0)).sample
    assert (other - output).abs().amax() > 1e-3


def test_a_mask_with_one_row_for_all_queries_is_the_mask_of_the_tokens() -> None:
    unet, sample = tiny_unet(context_dim=5), torch.randn(2, 2, 8, 8)
    text, mask = torch.randn(2, 7, 5), torch.tensor([[1] * 7, [1] * 3 + [0] * 4])

    assert torch.equal(unet(sample, 10, text, mask[:, None]).sample, unet(sample, 10, text, mask).sample)
    assert torch.equal(unet(sample, 10, text, mask[:, None].bool()).sample, unet(sample, 10, text, mask).sample)


def test_pooled_text_reaches_networks_without_any_attention() -> None:
    unet, sample = tiny_unet(context_dim=5, attention_levels=()), torch.randn(1, 2, 8, 8)
    assert not torch.allclose(unet(sample, 1, torch.ones(1, 3, 5)).sample, unet(sample, 1, torch.zeros(1, 3, 5)).sample)


@pytest.mark.parametrize(
    ("text", "mask", "message"),
    [
        (None, None, "context_dim=5: give it encoder_hidden_states"),
        (torch.zeros(1, 7, 4), None, r"\(B, N, 5\), got \(1, 7, 4\)"),
        (torch.zeros(2, 7, 5), torch.ones(2, 5), "for 5 tokens, but there are 7"),
        (torch.zeros(2, 7, 5), torch.ones(1, 7, 7), r"must be \(B, N\) or \(B, 1, N\), got \(1, 7, 7\)"),
        (torch.zeros(1, 7, 5), torch.zeros(1, 1, 7), r"\(B, 1, N\) must be bool or whole numbers"),
        (
            torch.zeros(2, 7, 5),
            torch.tensor([[0.0] * 5 + [-1e4] * 2] * 2),
            "non-zero for a real token, else 0, got a bias",
        ),
        (torch.zeros(2, 7, 5), torch.full((1, 7), -torch.inf), "else 0, got a bias: give bias == 0"),
        (torch.zeros(4, 7, 5), None, r"of the sample's batch, \(2, N, 5\), got \(4, 7, 5\)"),
        (torch.zeros(1, 7, 5), torch.ones(1, 7), r"of the sample's batch, \(2, N, 5\), got \(1, 7, 5\)"),
        (torch.zeros(2, 7, 5), torch.ones(3, 7), r"a row for each sample, \(2, N\), or one for all, got \(3, 7\)"),
        (torch.zeros(2, 7, 5), torch.ones(3, 1, 7).bool(), r"\(2, N\), or one for all, got \(3, 7\)"),
    ],
)
def test_text_that_does_not_fit_is_refused_before_any_compute(text, mask, message: str) -> None:
    unet = tiny_unet(context_dim=5)
    unet.conv_in.register_forward_hook(lambda *_: pytest.fail("computed before checking"))
    with pytest.raises(ValueError, match=message):
        unet(torch.zeros(2, 2, 16, 16), 0, text, mask)


@pytest.mark.parametrize("count", [0, 3])
def test_timesteps_are_one_or_one_for_each_sample(count: int) -> None:
    with pytest.raises(ValueError, match=rf"one for each sample, \(2,\), got \({count},\)"):
        tiny_unet()(torch.zeros(2, 2, 16, 16), torch.zeros(count))


def test_a_text_of_no_tokens_is_one_of_which_none_may_be_read() -> None:
    unet, sample, text = tiny_unet(context_dim=5), torch.randn(2, 2, 8, 8), torch.randn(2, 3, 5)
    expected = unet(sample, 10, text, torch.zeros(2, 3)).sample
    for mask in (None, torch.ones(2, 0)):
        found = unet(sample, 10, text[:, :0], mask).sample
        assert found.isfinite().all()
        assert_close(found, expected)


def test_text_given_to_a_network_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="context_dim=None: give it no text"):
        tiny_unet()(torch.zeros(1, 2, 16, 16), 0, torch.zeros(1, 7, 5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim_head": 5}, "dim_head must divide .* 5 and 16"),
        ({"dim_head": 0}, "dim_head .* 0"),
        ({"dim_head": None}, "dim_head .* None"),
        ({"sample_size": (16, 16)}, r"unet\.sample_size must be a whole number, got \(16, 16\)"),
        ({"layers_per_block": None}, r"unet\.layers_per_block must be a whole number, got None"),
        ({"block_channels": 8}, r"unet\.block_channels must be a list of whole numbers, got 8"),
        ({"attention_levels": None}, r"unet\.attention_levels must be a list of whole numbers, got None"),
        ({"attention_levels": (1.0,)}, r"unet\.attention_levels must be a list of whole numbers, got \(1\.0,\)"),
        ({"block_channels": (32.0, 64)}, r"unet\.block_channels must be a list of whole numbers, got \(32\.0, 64\)"),
        ({"block_channels": ["32"]}, r"unet\.block_channels must be a list of whole numbers, got \['32'\]"),
        ({"block_channels": (32, None)}, r"unet\.block_channels must be a list of whole numbers, got \(32, None\)"),
        ({"layers_per_block": True}, r"unet\.layers_per_block must be a whole number, got True"),
        ({"context_dim": False}, r"unet\.context_dim must be a whole number, got False"),
        ({"block_channels": (0, 16)}, r"block_channels must be multiples of 8.*, got \[0, 16\]"),
        ({"block_channels": (8, -16)}, "block_channels must be multiples of 8"),
        ({"context_dim": 0}, "context_dim must be at least 1, got 0"),
        ({"block_channels": (8, 20)}, "multiples of 8, .* 20"),
        ({"attention_levels": (2,)}, r"attention_levels must lie in 0..1.*\[2\]"),
        ({"sample_size": 17}, "sample_size .* must be a multiple of 2, .* 17"),
        ({"block_channels": ()}, "at least one level"),
        (
            {"x_prediction": True, "in_channels": 3, "out_channels": 1},
            "as many out_channels as in_channels, got 1 and 3",
        ),
        ({"format_version": 2}, "format_version 2.*reads 1"),
    ],
)
def test_a_config_that_cannot_work_is_refused_naming_the_key(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_unet(**options)


def test_a_sample_of_wrong_channels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(B, 2, H, W\), got \(1, 3, 16, 16\)"):
        tiny_unet()(torch.zeros(1, 3, 16, 16), 0)


@pytest.mark.parametrize(("pipeline", "scheduler"), [(DDPMPipeline, DDPMScheduler), (DDIMPipeline, DDIMScheduler)])
def test_it_runs_in_diffusers_own_unconditional_pipelines(pipeline: type, scheduler: type) -> None:
    pipe = pipeline(tiny_unet(in_channels=3, out_channels=3), scheduler(20))
    pipe.set_progress_bar_config(disable=True)
    images = pipe(
        batch_size=2, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np"
    ).images
    assert images.shape == (2, 16, 16, 3)
    assert images.std() > 0.01


def test_saving_and_loading_keep_every_weight_and_the_config(tmp_path) -> None:
    unet = tiny_unet(context_dim=5)
    unet.save_pretrained(tmp_path)
    loaded = AttnUNet2D.from_pretrained(tmp_path)
    assert loaded.config.attention_levels == [1] and loaded.config.format_version == 1
    assert loaded.state_dict().keys() == unet.state_dict().keys()
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in unet.state_dict().items())
    inputs = torch.randn(1, 2, 16, 16), 3, torch.randn(1, 4, 5)
    # a file's weights lie at other alignments in memory, where the kernels add up in another order
    assert_close(loaded(*inputs).sample, unet(*inputs).sample, atol=1e-5, rtol=1e-4)


def test_memory_layouts_give_one_result() -> None:
    unet, sample = tiny_unet(patch_size=2), torch.randn(2, 2, 16, 24)
    expected = unet(sample, 3).sample
    unet.to(memory_format=torch.channels_last)
    assert_close(unet(sample.contiguous(memory_format=torch.channels_last), 3).sample, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_can_be_kept_in_eight_bits_and_cast_layer_by_layer(dtype) -> None:
    unet = tiny_unet(context_dim=5)
    sample, text = torch.randn(2, 2, 12, 12), torch.randn(2, 7, 5)
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)  # so that what is zero at first does something
        expected = unet(sample, 500.0, text).sample
        unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)
        found = unet(sample.to(dtype), 500.0, text.to(dtype)).sample
    assert unet.conv_in.weight.dtype == torch.float8_e4m3fn and found.dtype == dtype
    assert (found.float() - expected).norm() < 0.2 * expected.norm()


def test_the_state_dict_names_levels_by_the_side_of_their_maps() -> None:
    keys = tiny_unet(context_dim=5).state_dict().keys()
    assert "down.16x16.0.residual.in_conv.weight" in keys
    assert "up.8x8.1.cross_attention.attention.to_kv.weight" in keys
    assert "mid.self_attention.attention.to_qkv.weight" in keys
