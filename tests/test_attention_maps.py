"""Which word drew which pixel."""

import pytest
import torch
from pipeline_parts import CAPTIONS, DIM, quiet, scheduler_for, seeds, text_parts, tiny_pipeline, tiny_unconditional
from torch.testing import assert_close
from transformers import BertTokenizerFast

from unet_attn.attention import CrossAttention2d
from unet_attn.pipelines.attention_maps import AttentionChoice
from unet_attn.pipelines.captions import caption_words, encode_captions
from unet_attn.pipelines.image_to_image import ImageToImagePipeline
from unet_attn.pipelines.inpaint import InpaintPipeline
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.tokenizer import train_tokenizer
from unet_attn.unet import AttnUNet2D


@pytest.fixture(scope="module")
def pipeline():
    """Two attention levels, of two and four heads."""
    text_encoder, tokenizer = text_parts()
    torch.manual_seed(1)
    unet = AttnUNet2D(
        sample_size=12, block_channels=(16, 32), attention_levels=(0, 1), dim_head=8, context_dim=DIM, patch_size=2
    )
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return quiet(TextToImagePipeline(unet, scheduler_for("flow"), text_encoder, tokenizer))


def sample(pipe, prompts, **options):
    number = 1 if isinstance(prompts, str) else len(prompts)
    return pipe(prompts, num_inference_steps=3, generator=seeds(*range(number)), output_type="pt", **options)


# --- words


def test_a_word_is_what_stands_between_spaces_and_owns_all_its_tokens():
    text_encoder, tokenizer = text_parts()
    captions = [" a  red heart!", "", "naïve 雲 ☁️", "word " * 30]
    found = caption_words(captions, tokenizer, text_encoder)
    assert [each.names for each in found[:3]] == [("a", "red", "heart!"), (), ("naïve", "雲")]
    encoding = tokenizer(captions, padding=True, truncation=True, max_length=11)
    for words, ids in zip(found, encoding.input_ids, strict=True):
        assert words.tokens.shape == (len(words.names), 11) and set(words.tokens.flatten().tolist()) <= {0.0, 1.0}
        special = [each in tokenizer.all_special_ids for each in ids]
        # every token is in one word, but for the special ones
        assert words.tokens.sum(dim=0).tolist() == [0.0 if each else 1.0 for each in special]
        for name, row in zip(words.names, words.tokens, strict=True):
            own = tokenizer.decode([each for each, mine in zip(ids, row, strict=True) if mine])
            # the last one may be cut in the middle of a character
            assert name.startswith(own.strip().rstrip("\ufffd"))


def test_a_tokenizer_of_another_kind_and_side_of_padding_is_read_alike(tmp_path):
    text_encoder, _ = text_parts()
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "he", "##art"]))
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"), padding_side="left", model_max_length=9)
    first, second = caption_words(["a heart", "a heart a"], tokenizer, text_encoder)
    assert first.names == ("a", "heart") and second.names == ("a", "heart", "a")
    # its padding goes to the end, as a caption must mean the same alone
    assert first.tokens.tolist() == [[0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]]


# --- maps


def test_the_pictures_are_identical_and_the_maps_sum_to_one_over_the_words(pipeline):
    prompts = [CAPTIONS[0], CAPTIONS[2]]
    plain = sample(pipeline, prompts, height=8)
    found = sample(pipeline, prompts, height=8, return_attention=True)
    assert plain.attention is None and torch.equal(plain.images, found.images)
    assert [each.words for each in found.attention] == [tuple(prompt.split()) for prompt in prompts]
    for each in found.attention:
        assert each.maps.shape == (len(each.words), 8, 12) and each.maps.dtype == torch.float32
        assert_close(each.maps.sum(dim=0), torch.ones(8, 12))
        assert each.maps.min() >= 0 and each.maps.std() > 1e-4


def test_the_maps_are_the_average_of_the_weights_of_every_layer_step_and_head(pipeline):
    """Against a plain reckoning that keeps the weights of every call."""
    kept = []

    def keep(layer, inputs, output):
        kept.append(layer.forward(*inputs, return_weights=True)[1][-2:])

    layers = [part for part in pipeline.unet.modules() if isinstance(part, CrossAttention2d)]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    found = sample(pipeline, CAPTIONS[:2], return_attention=True).attention
    for handle in handles:
        handle.remove()
    assert len(kept) == len(layers) * 3
    words = caption_words(["", "", *CAPTIONS[:2]], pipeline.tokenizer, pipeline.text_encoder)[2:]
    for row in range(2):
        total = 0.0
        for weights in kept:
            side = int(weights.shape[2] ** 0.5)
            maps = (weights[row].mean(dim=0) @ words[row].tokens.T).T.reshape(1, -1, side, side)
            total = total + torch.nn.functional.interpolate(maps, size=(12, 12), mode="bilinear")[0]
        assert_close(found[row].maps, total / total.sum(dim=0), rtol=0, atol=1e-5)


def test_a_picture_has_the_maps_it_has_alone_and_each_of_a_prompt_has_its_own(pipeline):
    together = sample(pipeline, [CAPTIONS[2], CAPTIONS[0]], return_attention=True).attention
    alone = sample(pipeline, CAPTIONS[2], return_attention=True).attention[0]
    assert_close(together[0].maps, alone.maps, rtol=0, atol=1e-4)
    pair = pipeline("a red heart", num_images_per_prompt=2, num_inference_steps=2, return_attention=True).attention
    assert pair[0].words == pair[1].words and (pair[0].maps - pair[1].maps).abs().max() > 1e-4


@pytest.mark.parametrize("choice", [{"levels": (1,)}, {"heads": (0,)}, {"steps": (2,)}])
def test_levels_heads_and_steps_can_be_chosen(pipeline, choice):
    everything = sample(pipeline, CAPTIONS[0], return_attention=True).attention[0]
    chosen = sample(pipeline, CAPTIONS[0], return_attention=AttentionChoice(**choice)).attention[0]
    assert (everything.maps - chosen.maps).abs().max() > 1e-4
    assert_close(chosen.maps.sum(dim=0), torch.ones(12, 12))


def test_weights_are_computed_for_the_chosen_calls_only_and_the_memory_does_not_grow(pipeline, monkeypatch):
    computed = []
    forward = CrossAttention2d.forward

    def counting(layer, x, context, context_mask=None, return_weights=False):
        if return_weights:
            computed.append((x.shape[0], x.shape[-1]))
        return forward(layer, x, context, context_mask, return_weights)

    monkeypatch.setattr(CrossAttention2d, "forward", counting)
    sample(pipeline, CAPTIONS[:2], return_attention=AttentionChoice(levels=(1,), steps=(0, 2)))
    # the rows of the prompts alone, at the level of 3 x 3, whose layers are one down, one in the middle and two up
    assert computed == [(2, 3)] * (4 * 2)
    assert not any(part._forward_hooks for part in pipeline.unet.modules())


def test_hooks_are_taken_away_when_the_call_fails(pipeline):
    def fail(caller, step, timestep, values):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        sample(pipeline, "a", return_attention=True, callback_on_step_end=fail)
    assert not any(part._forward_hooks for part in pipeline.unet.modules())


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_an_empty_prompt_has_no_maps_and_the_guidance_does_not_matter_to_the_rows(pipeline, scale):
    found = sample(pipeline, ["", "a red heart"], return_attention=True, guidance_scale=scale).attention
    assert found[0].words == () and found[0].maps.shape == (0, 12, 12)
    assert found[1].words == ("a", "red", "heart")


def test_without_return_dict_the_maps_come_second(pipeline):
    images, attention = sample(pipeline, "a", return_attention=True, return_dict=False)
    assert images.shape == (1, 3, 12, 12) and attention[0].words == ("a",)
    assert len(sample(pipeline, "a", return_dict=False)) == 1


def test_in_half_precision_the_maps_still_sum_to_one():
    pipe = tiny_pipeline().to(torch.bfloat16)
    maps = sample(pipe, "a red heart", return_attention=True).attention[0].maps
    assert maps.dtype == torch.float32
    assert_close(maps.sum(dim=0), torch.ones(12, 12))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"return_attention": AttentionChoice(levels=(2,))}, r"attention levels must be some of 0, 1, got \(2,\)"),
        ({"return_attention": AttentionChoice(heads=(2,))}, r"attention heads must be some of 0..1, got \(2,\)"),
        ({"return_attention": AttentionChoice(steps=(3,))}, r"attention steps must be some of 0..2, got \(3,\)"),
        ({"return_attention": AttentionChoice(steps=())}, "attention steps"),
        ({"return_attention": True, "guidance_scale": 0}, "at guidance_scale 0 the prompts are not looked at"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_any_compute(pipeline, options, message):
    with pytest.raises(ValueError, match=message):
        sample(pipeline, "a", **options)


@pytest.mark.parametrize("kind", [ImageToImagePipeline, InpaintPipeline])
def test_of_a_start_in_the_middle_the_steps_are_counted_from_there(pipeline, kind):
    pipe = kind.from_pipe(pipeline)
    image = {"image": torch.zeros(3, 12, 12)}
    image |= {"mask_image": torch.ones(12, 12)} if kind is InpaintPipeline else {}

    def changed(**options):
        return pipe("a red heart", **image, strength=0.5, num_inference_steps=4, generator=seeds(1), **options)

    first, both = (changed(return_attention=AttentionChoice(steps=steps)).attention[0].maps for steps in ((0,), (0, 1)))
    assert_close(both, changed(return_attention=True).attention[0].maps, rtol=0, atol=0)
    assert (first - both).abs().max() > 1e-6
    handle = pipe.unet.conv_in.register_forward_hook(lambda *_: pytest.fail("computed before checking"))
    with pytest.raises(ValueError, match=r"attention steps must be some of 0\.\.1, got \(2,\)"):
        changed(return_attention=AttentionChoice(steps=(2,)))
    handle.remove()


def test_a_model_without_text_has_no_maps():
    with pytest.raises(ValueError, match="trained without text: it has no attention"):
        tiny_unconditional()(return_attention=True)


def test_an_encoder_of_captions_gives_what_the_words_are_over():
    text_encoder, _ = text_parts()
    tokenizer = train_tokenizer(CAPTIONS, vocab_size=300, max_length=11)
    states, _ = encode_captions(CAPTIONS, tokenizer, text_encoder)
    assert [each.tokens.shape[1] for each in caption_words(CAPTIONS, tokenizer, text_encoder)] == [states.shape[1]] * 3
