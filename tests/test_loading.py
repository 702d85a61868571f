import json
import shutil

import pytest
import torch
from pipeline_parts import DIM, scheduler_for, seeds, text_parts, tiny_pipeline, tiny_unconditional, tiny_unet
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import BertConfig, BertModel

from unet_attn.pipelines.loading import check_format_version, load_component, parse_dtype
from unet_attn.pipelines.text_to_image import TextToImagePipeline, encode_captions
from unet_attn.text_encoder import PretrainedText, TextEncoder
from unet_attn.unet import AttnUNet2D

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def saved(tmp_path):
    tiny_pipeline().save_pretrained(tmp_path / "pipe")
    return tmp_path / "pipe"


def change_weights(folder, change):
    weights = load_file(folder / WEIGHTS)
    save_file(change(weights), folder / WEIGHTS, metadata={"format": "pt"})


def change_json(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_loaded_pipeline_gives_the_same_pictures(saved):
    expected, found = (
        pipe("a red heart", num_inference_steps=2, generator=seeds(1), output_type="pt").images
        for pipe in (tiny_pipeline(), TextToImagePipeline.from_pretrained(str(saved)))
    )
    assert torch.equal(found, expected)


def test_loading_runs_no_code_of_the_folder(saved):
    for path in saved.rglob("*.py"):
        path.write_text("raise SystemExit('this must not run')")
    pipe = TextToImagePipeline.from_pretrained(saved)
    assert type(pipe.unet) is AttnUNet2D and type(pipe.text_encoder) is TextEncoder
    assert pipe.name_or_path == str(saved) and not pipe.unet.training


def test_a_folder_saved_again_does_not_tell_where_it_was_loaded_from(saved, tmp_path):
    TextToImagePipeline.from_pretrained(saved).save_pretrained(tmp_path / "again")
    texts = [path.read_text() for path in (tmp_path / "again").rglob("*.json")]
    assert len(texts) > 4
    assert not any(str(saved) in text for text in texts)


def test_an_unconditional_pipeline_loads_without_text(tmp_path):
    tiny_unconditional("sample", channels=1).save_pretrained(tmp_path)
    pipe = TextToImagePipeline.from_pretrained(tmp_path)
    assert pipe.text_encoder is None and pipe.tokenizer is None and pipe.config.prediction_type == "sample"


def test_a_missing_weight_is_an_error_that_names_it(saved):
    change_weights(saved, lambda weights: {k: v for k, v in weights.items() if k != "conv_in.weight"})
    with pytest.raises(ValueError, match=r"unet are not those of this AttnUNet2D: missing conv_in\.weight$"):
        TextToImagePipeline.from_pretrained(saved)


def test_a_renamed_weight_is_missing_and_left_over(saved):
    change_weights(saved, lambda weights: {k.replace("conv_in.bias", "entry.bias"): v for k, v in weights.items()})
    with pytest.raises(ValueError, match=r"missing conv_in\.bias; unexpected entry\.bias$"):
        load_component(AttnUNet2D, saved / "unet")


def test_weights_of_a_wrapped_model_fail_loudly_and_in_one_line(saved):
    change_weights(saved, lambda weights: {f"module._orig_mod.{k}": v for k, v in weights.items()})
    with pytest.raises(ValueError, match=r"missing .* and \d+ more; unexpected module\._orig_mod\.") as caught:
        load_component(AttnUNet2D, saved / "unet")
    assert "\n" not in str(caught.value)


def test_a_weight_of_another_shape_is_named(saved):
    change_weights(saved, lambda weights: {**weights, "conv_in.bias": torch.zeros(5)})
    with pytest.raises(ValueError, match=r"of another shape conv_in\.bias"):
        load_component(AttnUNet2D, saved / "unet")


def test_a_cut_weight_file_is_named(saved):
    path = saved / WEIGHTS
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"the weights in .*unet cannot be read"):
        TextToImagePipeline.from_pretrained(saved)


def test_the_config_must_be_the_classes_own(saved):
    with pytest.raises(ValueError, match="is of a AttnUNet2D, not of a TextEncoder"):
        load_component(TextEncoder, saved / "unet")
    change_json(saved / "unet" / "config.json", depth=3)
    with pytest.raises(ValueError, match="keys that AttnUNet2D does not know: depth"):
        load_component(AttnUNet2D, saved / "unet")


@pytest.mark.parametrize("path", ["model_index.json", "unet/config.json", "text_encoder/config.json"])
def test_another_format_version_is_refused_by_number(saved, path):
    change_json(saved / path, format_version=2)
    with pytest.raises(ValueError, match="has format_version 2, this release of unet-attn reads format_version 1"):
        TextToImagePipeline.from_pretrained(saved)
    check_format_version(1, 1, "x")


def test_a_later_layout_is_refused_before_its_parts_are_read(saved):
    change_json(saved / "model_index.json", format_version=2, unet=["later", "LaterUNet"])
    with pytest.raises(ValueError, match="install a release that reads 2"):
        TextToImagePipeline.from_pretrained(saved)


def test_a_repository_is_fetched_as_the_hub_is_told(saved, monkeypatch):
    asked = {}

    def fetched(repository, **options):
        asked.update(options, repository=repository)
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    TextToImagePipeline.from_pretrained("someone/icons", revision="v1", token="t", local_files_only=True)

    del asked["allow_patterns"]
    expected = {"repository": "someone/icons", "revision": "v1", "token": "t", "cache_dir": None}
    assert asked == expected | {"local_files_only": True}


def test_what_is_no_pipeline_is_one_clear_line(tmp_path, saved):
    cases = [
        (tmp_path / "nothing", "is no folder"),
        (tmp_path, "is no saved pipeline: it has no model_index.json"),
        (saved / "model_index.json", "is no folder"),
    ]
    for path, message in cases:
        with pytest.raises(FileNotFoundError, match=message) as caught:
            TextToImagePipeline.from_pretrained(path)
        assert "\n" not in str(caught.value)
    (saved / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"scheduler_config\.json is missing"):
        TextToImagePipeline.from_pretrained(saved)
    (saved / "model_index.json").write_text("{")
    with pytest.raises(ValueError, match=r"model_index\.json is not JSON"):
        TextToImagePipeline.from_pretrained(saved)


def test_a_part_of_an_unknown_class_is_refused_and_never_imported(saved):
    change_json(saved / "model_index.json", unet=["os", "system"])
    with pytest.raises(ValueError, match="holds a system, which is no part that unet-attn knows"):
        TextToImagePipeline.from_pretrained(saved)
    change_json(saved / "model_index.json", unet=[None, None])
    with pytest.raises(ValueError, match="names no unet and scheduler"):
        TextToImagePipeline.from_pretrained(saved)


@pytest.mark.parametrize("entry", ["x", ["x"], 3, [3, "AttnUNet2D"], ["x", None], {"x": 1}, ["x", "y", "z"]])
def test_an_entry_that_names_no_part_is_told_with_the_file_and_the_part(saved, entry):
    change_json(saved / "model_index.json", unet=entry)
    with pytest.raises(ValueError, match=r"model_index\.json must name unet as \[library, class\], got "):
        TextToImagePipeline.from_pretrained(saved)


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        (
            "unet",
            {"block_channels": [8.0, 16]},
            r"unet\.block_channels must be a list of whole numbers, got \[8\.0, 16",
        ),
        ("text_encoder", {"depth": 1.0}, r"text_encoder\.depth must be a whole number, got 1\.0"),
    ],
)
def test_a_setting_of_another_kind_in_a_saved_config_is_named(saved, part, values, message):
    change_json(saved / part / "config.json", **values)
    for load in (
        lambda: TextToImagePipeline.from_pretrained(saved),
        lambda: {"unet": AttnUNet2D, "text_encoder": TextEncoder}[part].from_pretrained(saved / part),
    ):
        with pytest.raises(ValueError, match=message):
            load()


def test_parts_that_are_given_replace_the_saved_ones(saved):
    change_weights(saved, lambda weights: {})
    unet, (text_encoder, tokenizer) = tiny_unet(seed=3), text_parts(3)
    pipe = TextToImagePipeline.from_pretrained(saved, unet=unet, text_encoder=text_encoder, tokenizer=tokenizer)
    assert pipe.unet is unet and pipe.text_encoder is text_encoder and pipe.tokenizer is tokenizer


@pytest.mark.parametrize("dtype", [torch.float16, "float16", "fp16", "torch.float16"])
def test_the_dtype_is_that_of_every_float_of_every_part(saved, dtype):
    for option in ("dtype", "torch_dtype"):
        pipe = TextToImagePipeline.from_pretrained(saved, **{option: dtype})
        parameters = [*pipe.unet.parameters(), *pipe.text_encoder.parameters()]
        assert {parameter.dtype for parameter in parameters} == {torch.float16}


@pytest.mark.parametrize("dtype", [None, "float32", "fp16"])
def test_a_file_of_several_dtypes_loads_in_the_one_asked_for(tmp_path, dtype):
    pipe = tiny_pipeline()
    pipe.unet.down.half()  # the first weights of the file, and not the others
    pipe.unet.save_pretrained(tmp_path)
    wanted = torch.float16 if dtype == "fp16" else torch.float32
    for loaded in (
        load_component(AttnUNet2D, tmp_path, dtype=dtype),
        AttnUNet2D.from_pretrained(tmp_path, dtype=wanted),
        AttnUNet2D.from_pretrained(tmp_path, torch_dtype=str(wanted)),
    ):
        assert {weight.dtype for weight in loaded.parameters()} == {wanted}
    pipe.unet.float().half().conv_in.float()
    pipe.unet.save_pretrained(tmp_path)
    assert {weight.dtype for weight in load_component(AttnUNet2D, tmp_path, dtype=dtype).parameters()} == {wanted}


def test_what_is_no_floating_dtype_is_refused():
    for dtype in ("int8", "half a byte", "nn", 16, torch.int32, "float8_e4m3fn", torch.float8_e5m2):
        with pytest.raises(ValueError, match="dtype must be"):
            parse_dtype(dtype)
    assert parse_dtype("bf16") is torch.bfloat16 and parse_dtype(None) is None
    assert parse_dtype("float64") is torch.float64


def test_a_variant_is_half_the_size_and_a_missing_one_is_an_error(saved):
    pipe = TextToImagePipeline.from_pretrained(saved)
    pipe.to(torch.float16).save_pretrained(saved, variant="fp16")
    half = TextToImagePipeline.from_pretrained(saved, variant="fp16", dtype="float16")
    full = TextToImagePipeline.from_pretrained(saved)
    assert half.unet.dtype == torch.float16 and full.unet.dtype == torch.float32
    assert_close(full.unet.conv_in.weight, tiny_unet().conv_in.weight)
    assert torch.equal(half.unet.conv_in.weight, full.unet.conv_in.weight.half())
    sizes = [(saved / "unet" / f"diffusion_pytorch_model{v}.safetensors").stat().st_size for v in (".fp16", "")]
    assert sizes[0] < 0.65 * sizes[1]
    with pytest.raises(
        FileNotFoundError, match=r"no weights for variant='bf16': diffusion_pytorch_model\.bf16\.safetensors"
    ):
        TextToImagePipeline.from_pretrained(saved, variant="bf16")


def test_a_variant_that_only_one_part_has_is_an_error(saved):
    tiny_unet().half().save_pretrained(saved / "unet", variant="fp16")
    with pytest.raises(FileNotFoundError, match="text_encoder has no weights for variant='fp16'"):
        TextToImagePipeline.from_pretrained(saved, variant="fp16")


def test_sharded_weights_load_and_a_missing_shard_is_an_error(saved):
    tiny_pipeline().save_pretrained(saved / "sharded", max_shard_size="10KB")
    shards = sorted((saved / "sharded" / "unet").glob("*-of-*.safetensors"))
    assert len(shards) > 1
    loaded = TextToImagePipeline.from_pretrained(saved / "sharded")
    assert_close(loaded.unet.state_dict(), tiny_unet().state_dict())
    shards[0].unlink()
    with pytest.raises((ValueError, FileNotFoundError), match="unet"):
        TextToImagePipeline.from_pretrained(saved / "sharded")


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_a_pipeline_saved_over_one_in_shards_loads(variant, tmp_path):
    tiny_pipeline().save_pretrained(tmp_path, variant=variant, max_shard_size="10KB")
    tiny_pipeline(seed=1).save_pretrained(tmp_path, variant=variant)
    loaded = TextToImagePipeline.from_pretrained(tmp_path, variant=variant)
    assert_close(loaded.unet.state_dict(), tiny_unet(seed=1).state_dict())
    assert_close(loaded.text_encoder.state_dict(), text_parts(1)[0].state_dict())


def test_a_pipeline_with_a_pretrained_text_model_is_saved_with_its_weights(tmp_path):
    _, tokenizer = text_parts()
    tokenizer.model_max_length = 10**30  # what transformers writes where the limit is not known
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=DIM,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=17,
        max_position_embeddings=13,
    )
    BertModel(config).save_pretrained(tmp_path / "bert")
    text_encoder = PretrainedText(str(tmp_path / "bert"))
    states, mask = encode_captions(["a red heart", "w " * 50], tokenizer, text_encoder)
    assert states.shape == (2, 13, DIM) and mask[1].all()

    pipe = TextToImagePipeline(tiny_unet(), scheduler_for("flow"), text_encoder, tokenizer)
    pipe.save_pretrained(tmp_path / "pipe")
    shutil.rmtree(tmp_path / "bert")
    loaded = TextToImagePipeline.from_pretrained(tmp_path / "pipe")
    again, _ = encode_captions(["a red heart", "w " * 50], loaded.tokenizer, loaded.text_encoder)
    assert torch.equal(states, again)
    loaded("a", num_inference_steps=1)
