"""The model card: what it says, that a person's own is left alone, and that loading does not mind it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from pipeline_parts import seeds, tiny_pipeline, tiny_unconditional
from run_folder import STEPS, evaluation, write_bare_run, write_run
from test_portable import run as run_alone

from unet_attn.model_card import model_card, write_model_card
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.run_record import parameter_count


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a real pipeline in it."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "my_icons")
    tiny_pipeline().save_pretrained(folder)
    return folder


def parts(card: str) -> tuple[dict, str]:
    """The front matter and the page."""
    _, front, body = card.split("---\n", 2)
    return yaml.safe_load(front), body


def change(run: Path, section: str, values: dict[str, object]) -> None:
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config[section] = {**(config.get(section) or {}), **values}
    path.write_text(yaml.safe_dump(config), encoding="utf-8")


def test_the_card_says_what_the_model_is_and_how_it_was_made(run: Path) -> None:
    front, body = parts(model_card(run))

    assert front["library_name"] == "diffusers" and front["pipeline_tag"] == "text-to-image"
    assert "license" not in front and "datasets" not in front
    unet = sum(parameter.numel() for parameter in tiny_pipeline().unet.parameters())
    for told in (
        "# my\\_icons\n",
        "Draws grey pictures of 16 x 16 pixels from a caption.",
        f"the U-Net {unet:,}",
        'TextToImagePipeline.from_pretrained("my_icons")',
        'DiffusionPipeline.from_pretrained("my_icons", trust_remote_code=True)',
        'pipe("a red heart", num_inference_steps=25, guidance_scale=3.0)',
        "| pictures | 1,200 |",
        r"| times | logit\_normal, mean 0.5, deviation 1.0 |",
        "| optimizer | muon 0.02, AdamW for the rest, learning rate 0.001 |",
        f"| steps | {STEPS:,} |",
        "| averaged weights (EMA) | 0.999 |",
        "| KID x 1000 | 42.77 ± 10.79 |",
        "257 sampled pictures against 251 real; features of EfficientNet-Lite0; 16 px",
        "accelerate launch scripts/train.py --config config.yaml --data.path PICTURES",
    ):
        assert told in body, told


def test_no_path_of_the_machine_and_no_markup_of_users_gets_into_the_card(run: Path, tmp_path: Path) -> None:
    judged = {**evaluation(), "extractor": "the image transformer of the judge /home/me/runs/judge_a"}
    copy = write_bare_run(tmp_path / "run", steps=3)
    (copy / "evaluation.json").write_text(json.dumps(judged), encoding="utf-8")
    (copy / "model_index.json").write_text("{}", encoding="utf-8")
    change(copy, "train", {"sample_prompts": ['"""\n```\n<b>']})

    card = model_card(copy)

    assert "/home" not in card and "<mine>" not in card
    assert "| name | pictures of &lt;mine&gt; |" in card
    assert "the judge judge\\_a" in card
    assert 'pipe("\\"\\"\\" ``` <b>").images' in card and card.count("\n```") == 6  # three blocks, each with two fences


def test_a_model_without_text_a_frozen_text_model_and_a_run_by_the_clock_are_described(tmp_path: Path) -> None:
    wordless, clock = write_bare_run(tmp_path / "wordless", text=False), write_bare_run(tmp_path / "clock", steps=7)
    for run in (wordless, clock):
        (run / "model_index.json").write_text("{}", encoding="utf-8")
    change(clock, "train", {"max_steps": None, "max_minutes": 9, "resume": "latest"})
    change(clock, "text_encoder", {"class_path": "unet_attn.text_encoder.PretrainedText"})

    front, body = parts(model_card(wordless))
    assert front["pipeline_tag"] == "unconditional-image-generation"
    assert "pipe().images[0]" in body and "Scores" not in body
    assert not [word for word in ("caption,", "words", "prompt") if word in body]
    assert "But for its text encoder it was trained from scratch" in model_card(clock)
    assert "--train.resume null --train.max_minutes null --train.max_steps 7\n" in model_card(clock)


def test_the_call_has_the_pipelines_own_numbers_and_none_where_an_older_release_saved_none(tmp_path: Path) -> None:
    run = write_bare_run(tmp_path / "run", steps=3)
    index = run / "model_index.json"
    for saved, call in (
        ('{"default_steps": 2, "default_guidance_scale": 1.0}', ", num_inference_steps=2, guidance_scale=1.0).images"),
        ("{}", '").images'),
    ):
        index.write_text(saved, encoding="utf-8")
        assert model_card(run).count(call) == 2  # with unet-attn and without
    for saved, message in (
        ('{"default_steps": "<b>"}', "has default_steps '<b>', which is no number"),
        ("{", "is no index of a pipeline"),
        ("3", "is no index of a pipeline"),
    ):
        index.write_text(saved, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            model_card(run)


def test_a_card_is_written_again_until_a_person_edits_it(run: Path, tmp_path: Path) -> None:
    copy = write_bare_run(tmp_path / "run", steps=3)
    (copy / "model_index.json").write_text("{}", encoding="utf-8")
    card = copy / "README.md"

    assert write_model_card(copy) == card
    first = card.read_text(encoding="utf-8")
    change(copy, "train", {"seed": 4711})
    assert write_model_card(copy) == card and "| seed | 4711 |" in card.read_text(encoding="utf-8")
    assert "| seed | 4711 |" not in first

    for own in (first + "\nMy words.\n", first.replace("library_name", "license: mit\nlibrary_name"), "# Mine\n", ""):
        card.write_text(own, encoding="utf-8")
        assert write_model_card(copy) is None and card.read_text(encoding="utf-8") == own
    card.write_bytes(b"\xff\xfe")
    assert write_model_card(copy) is None and card.read_bytes() == b"\xff\xfe"


def test_a_folder_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no pipeline yet"):
        write_model_card(write_bare_run(tmp_path / "run", steps=2))


def test_parameters_are_those_of_the_weights_without_their_variants(run: Path, tmp_path: Path) -> None:
    pipeline = tiny_unconditional()
    pipeline.save_pretrained(tmp_path)
    pipeline.save_pretrained(tmp_path, variant="fp16")

    assert parameter_count(tmp_path / "unet") == sum(each.numel() for each in pipeline.unet.parameters())
    assert parameter_count(tmp_path / "none") is None
    (tmp_path / "unet/diffusion_pytorch_model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"the weights in .*unet cannot be read"):
        parameter_count(tmp_path / "unet")


def test_our_pipeline_loads_from_a_folder_with_card_and_report(run: Path) -> None:
    write_model_card(run)
    pipe = TextToImagePipeline.from_pretrained(run)
    pipe.set_progress_bar_config(disable=True)

    picture = pipe("a red heart", num_inference_steps=2, generator=seeds(3), output_type="np").images

    expected = tiny_pipeline()("a red heart", num_inference_steps=2, generator=seeds(3), output_type="np").images
    np.testing.assert_array_equal(picture, expected)


@pytest.mark.slow
def test_stock_diffusers_loads_from_a_folder_with_a_card(run: Path, tmp_path: Path) -> None:
    write_model_card(run)

    done = run_alone("print(picture(load(sys.argv[1])).shape)", tmp_path / "cache", run)

    assert "(2, 12, 12, 3)" in done.stdout


def test_a_tuned_model_names_what_it_was_tuned_from_and_not_where_that_lay(run: Path, tmp_path: Path) -> None:
    tuned = shutil.copytree(run, tmp_path / "few")
    change(tuned, "consistency", {"start": "/home/someone/runs/my_icons", "steps": 4})
    front, body = parts(model_card(tuned))

    assert "trained-from-scratch" not in front["tags"]
    assert "trained from scratch" not in body
    assert "A diffusion model tuned from my\\_icons to draw in few steps, with unet-attn" in body
    assert "| tuned from | my_icons |" in body.replace("\\_", "_")
    assert "--consistency.start START" in body and "in START:" in body
    assert "/home/someone" not in body
