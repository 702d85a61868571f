"""Our attention inside diffusers' own networks: the same pictures, maps on request, and training."""

import pytest
import torch
from diffusers import DDIMPipeline, DDIMScheduler, UNet2DConditionModel, UNet2DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.attention_processor import AttnProcessor as DiffusersAttnProcessor
from diffusers.models.attention_processor import AttnProcessor2_0 as DiffusersAttnProcessor2_0
from torch import Tensor, nn
from torch.testing import assert_close

from unet_attn.diffusers_processor import AttnProcessor, set_processors


def condition_unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=7,
        attention_head_dim=2,
        norm_num_groups=4,
    ).eval()


def plain_unet() -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=4,
        norm_num_groups=4,
    ).eval()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_a_text_conditional_unet_predicts_the_same(keep_weights: bool, masked: bool) -> None:
    unet = condition_unet()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]) if masked else None
    inputs = (randn(2, 2, 8, 12), torch.tensor([3, 700]), randn(2, 5, 7, seed=1))
    expected = unet(*inputs, encoder_attention_mask=mask).sample

    processors = set_processors(unet, keep_weights=keep_weights)
    assert_close(unet(*inputs, encoder_attention_mask=mask).sample, expected, atol=1e-5, rtol=1e-5)

    assert {name.rsplit(".", 1)[1] for name in processors} == {"attn1", "attn2"}
    for name, processor in processors.items():
        if not keep_weights:
            assert processor.weights is None
            continue
        batch, heads, queries, keys = processor.weights.shape
        assert (batch, heads) == (2, 2) and keys == (5 if name.endswith("attn2") else queries)
        assert_close(processor.weights.sum(-1), torch.ones(2, 2, queries))
        if masked and name.endswith("attn2"):
            assert (processor.weights[1, ..., 2:] == 0).all()


@torch.no_grad()
def test_one_processor_for_all_gives_the_same_too() -> None:
    unet = condition_unet()
    inputs = (randn(2, 2, 8, 12), 3, randn(2, 5, 7, seed=1))
    expected = unet(*inputs).sample
    unet.set_attn_processor(AttnProcessor())
    assert_close(unet(*inputs).sample, expected, atol=1e-5, rtol=1e-5)


def test_the_unconditional_pipeline_samples_the_same_pictures() -> None:
    def sample(unet: UNet2DModel) -> Tensor:
        pipeline = DDIMPipeline(unet, DDIMScheduler(20))
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        return torch.from_numpy(pipeline(2, generator=generator, num_inference_steps=3, output_type="np").images)

    unet = plain_unet()
    expected = sample(unet)
    assert len(set_processors(unet)) == 4
    assert_close(sample(unet), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("build", [condition_unet, plain_unet])
def test_it_trains_inside_diffusers_networks(build) -> None:
    unet = build().train()
    set_processors(unet)
    target = randn(2, unet.config.in_channels, 8, 8)
    text = (randn(2, 5, 7, seed=1),) if build is condition_unet else ()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = (unet(target, 10, *text).sample - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    query_weights = [parameter for name, parameter in unet.named_parameters() if "to_q.weight" in name]
    assert all(weight.grad.abs().sum() > 0 for weight in query_weights)


@pytest.mark.parametrize(
    "options",
    [
        {"norm_num_groups": 4, "residual_connection": True, "rescale_output_factor": 2.0, "bias": True},
        {"qk_norm": "layer_norm"},
        {"cross_attention_dim": 7, "cross_attention_norm": "layer_norm"},
    ],
)
@torch.no_grad()
def test_every_setting_of_attention_computes_what_diffusers_computes(options: dict) -> None:
    torch.manual_seed(0)
    attn = Attention(12, heads=3, dim_head=4, **options)
    context = randn(2, 5, 7) if "cross_attention_dim" in options else None
    for x in (randn(2, 12, 3, 5), randn(2, 11, 12)):
        attn.set_processor(attn.get_processor())
        expected = Attention.forward(attn, x, context)
        processor = AttnProcessor()
        assert_close(processor(attn, x, context), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("theirs", [DiffusersAttnProcessor(), DiffusersAttnProcessor2_0()])
@pytest.mark.parametrize("keep_weights", [False, True])
@torch.no_grad()
def test_a_bias_on_the_scores_is_added_and_not_taken_for_a_mask(theirs, keep_weights: bool) -> None:
    attn, x, bias = Attention(12, heads=3, dim_head=4), randn(2, 5, 12), randn(2, 5, 5, seed=1)
    ours = AttnProcessor(keep_weights)
    assert_close(ours(attn, x, None, bias), theirs(attn, x, None, bias), atol=1e-5, rtol=1e-5)

    of_each_head = randn(6, 1, 5, seed=2)
    assert_close(ours(attn, x, None, of_each_head), theirs(attn, x, None, of_each_head), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("theirs", [DiffusersAttnProcessor(), DiffusersAttnProcessor2_0()])
@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_query_whose_keys_are_all_masked_attends_as_in_diffusers(theirs, keep_weights: bool, dtype) -> None:
    torch.manual_seed(0)
    attn, x = Attention(12, heads=3, dim_head=4).to(dtype), randn(2, 5, 12).to(dtype)
    mask = torch.tensor([[[1, 1, 0, 0, 0]], [[0, 0, 0, 0, 0]]])
    ours, bias = AttnProcessor(keep_weights), ((1 - mask) * -10000.0).to(dtype)
    output = ours(attn, x, None, bias)

    # -10000 takes digits off the scores: up to 5e-4 in float32; theirs adds it in bfloat16, where all of them drown
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    expected = theirs(attn, x, None, bias)
    rows = slice(1 if dtype == torch.bfloat16 and isinstance(theirs, DiffusersAttnProcessor) else 2)
    assert_close(output[rows], expected[rows], atol=tolerance, rtol=tolerance)
    if keep_weights:
        assert (ours.weights[0, ..., 2:] == 0).all()
        assert_close(ours.weights.sum(-1), torch.ones(2, 3, 5, dtype=dtype), atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((2, 4), "4 keys, but there are 5"),
        ((2, 1, 4), "4 keys, but there are 5"),
        ((2, 3, 5), "3 queries, but there are 5"),
        ((4, 5), r"must be \(2, 5\) or \(2, 5, 5\), got shape \(4, 5\)"),
        ((2, 3, 5, 5), r"got shape \(2, 3, 5, 5\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_with_what_would(shape: tuple[int, ...], said: str) -> None:
    attn = Attention(12, heads=3, dim_head=4)
    with pytest.raises(ValueError, match=said):
        AttnProcessor()(attn, randn(2, 5, 12), None, torch.zeros(shape))
    with pytest.raises(ValueError, match=r"bool, or float to be added, got torch.int64"):
        AttnProcessor()(attn, randn(2, 5, 12), None, torch.ones(2, 5, dtype=torch.long))


@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
@torch.no_grad()
def test_an_axis_of_one_for_the_heads_is_taken_as_diffusers_takes_it(keep_weights: bool, queries: int) -> None:
    attn, x, context = Attention(12, heads=3, dim_head=4), randn(2, 3, 12), randn(2, 5, 12, seed=1)
    for mask in (randn(2, 1, queries, 5, seed=2), randn(2, 1, queries, 5, seed=2) > 0):
        expected = DiffusersAttnProcessor2_0()(attn, x, context, mask)
        assert_close(AttnProcessor(keep_weights)(attn, x, context, mask), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("keep_weights", [False, True])
def test_another_batch_of_the_context_and_a_mask_that_is_no_tensor_are_refused(keep_weights: bool) -> None:
    attn, processor = Attention(12, heads=3, dim_head=4), AttnProcessor(keep_weights)
    for batches in ((2, 1), (1, 2)):
        x, context = (randn(batch, 5, 12) for batch in batches)
        with pytest.raises(ValueError, match="one batch size, got {}, {} and {}".format(*batches, batches[1])):
            processor(attn, x, context)
    with pytest.raises(ValueError, match="attention mask must be a tensor, got a ndarray"):
        processor(attn, randn(2, 5, 12), None, torch.zeros(2, 5).numpy())


@pytest.mark.parametrize("keep_weights", [False, True])
@torch.no_grad()
def test_a_boolean_mask_keeps_what_is_true(keep_weights: bool) -> None:
    attn, x = Attention(12, heads=3, dim_head=4), randn(2, 5, 12)
    mask = torch.tensor([[True, True, True, False, False], [False] * 5])
    output = AttnProcessor(keep_weights)(attn, x, x, mask)
    assert_close(output[:1], AttnProcessor()(attn, x[:1], x[:1, :3]), atol=1e-6, rtol=1e-5)
    assert_close(output[1], attn.to_out[0].bias.expand(5, 12))
    assert_close(output, DiffusersAttnProcessor2_0()(attn, x, x, mask[:, None]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"added_kv_proj_dim": 4}, "added_kv_proj_dim"), ({"scale_qk": False}, "scale_qk"), ({"kv_heads": 1}, "kv_heads")],
)
def test_an_attention_that_would_be_computed_wrongly_is_refused(options: dict, name: str) -> None:
    attn: nn.Module = Attention(12, heads=3, dim_head=4, **options)
    with pytest.raises(ValueError, match=name):
        AttnProcessor()(attn, randn(1, 5, 12))


def test_a_network_is_changed_as_a_whole_or_not_at_all() -> None:
    good, bad = Attention(12), Attention(12, scale_qk=False)
    before = good.processor
    with pytest.raises(ValueError, match="scale_qk"):
        set_processors(nn.Sequential(good, bad))
    assert good.processor is before
    with pytest.raises(ValueError, match="Linear has no Attention"):
        set_processors(nn.Linear(3, 3))
