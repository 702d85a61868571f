"""scripts/sample.py as a user calls it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from PIL import Image
from pipeline_parts import scheduler_for, tiny_pipeline, tiny_unconditional, tiny_unet

from unet_attn.data import to_tensor
from unet_attn.judge import Judge, JudgeSize, best_first
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.tokenizer import train_tokenizer

SCRIPT = Path(__file__).parent.parent / "scripts" / "sample.py"
sys.path.insert(0, str(SCRIPT.parent))

import sample as sample_script  # noqa: E402  a script, found through the line above


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tiny_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def unconditional_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unconditional")
    tiny_unconditional("epsilon", channels=1).save_pretrained(folder)
    return folder


def call(folder, out, *options):
    return sample_script.main([str(folder), "--out", str(out), "--steps", "2", *options])


def pictures(out):
    return {path.name: path for path in sorted(out.glob("*.png")) if path.name != "grid.png"}


def test_each_picture_has_its_own_seed_in_name_and_metadata_and_is_made_again_alone(run_folder, tmp_path):
    prompts = ["--prompt", "A red heart!", "cloud 雲", "--negative_prompt", "blue"]
    assert call(run_folder, tmp_path / "all", *prompts, "--num_images", "3", "--seed", "7", "--batch_size", "4") == 0
    found = pictures(tmp_path / "all")
    assert list(found) == [f"{7 + n:05d}-{'a-red-heart' if n < 3 else 'cloud-雲'}.png" for n in range(6)]
    for number, path in enumerate(found.values()):
        about = Image.open(path).text
        assert about == {
            "seed": str(7 + number),
            "prompt": "A red heart!" if number < 3 else "cloud 雲",
            "negative_prompt": "blue",
            "steps": "2",
            "scheduler": "FlowMatchEulerDiscreteScheduler",
            "guidance_scale": "3.0",
            "dtype": "float32",
            "height": "12",
            "width": "12",
        }
    about = Image.open(list(found.values())[4]).text
    again = ["--prompt", about["prompt"], "--negative_prompt", about["negative_prompt"], "--seed", about["seed"]]
    assert call(run_folder, tmp_path / "one", *again) == 0
    (one,) = pictures(tmp_path / "one").values()
    difference = np.asarray(Image.open(one)).astype(int) - np.asarray(Image.open(list(found.values())[4]))
    assert np.abs(difference).max() <= 1
    grid = Image.open(tmp_path / "all" / "grid.png")
    assert grid.width == 3 * (96 + 6) + 6


@pytest.mark.parametrize(
    "scheduler", ["FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler", "DPMSolverMultistepScheduler"]
)
def test_a_picture_is_made_again_from_its_file(run_folder, tmp_path, scheduler):
    options = ["--prompt", "cloud 雲", "", "--negative_prompt", "blue", "--num_images", "2", "--seed", "7"]
    options += ["--guidance_scale", "4.5", "--height", "8", "--scheduler", scheduler, "--dtype", "bfloat16"]
    assert call(run_folder, tmp_path / "all", *options) == 0
    for number, path in enumerate(pictures(tmp_path / "all").values()):
        out = tmp_path / str(number)
        assert sample_script.main([str(run_folder), "--out", str(out), "--like", str(path)]) == 0
        (again,) = pictures(out).values()
        assert again.name == path.name and Image.open(again).text == Image.open(path).text
        difference = np.asarray(Image.open(again)).astype(int) - np.asarray(Image.open(path))
        assert np.abs(difference).max() <= 4  # bfloat16 rounds a batch of four otherwise than one alone


def test_a_picture_without_prompt_or_with_noise_in_its_steps_is_made_again(unconditional_folder, tmp_path):
    options = ["--num_images", "3", "--scheduler", "DDPMScheduler"]
    assert call(unconditional_folder, tmp_path / "all", *options) == 0
    path = tmp_path / "all" / "00002.png"
    assert "prompt" not in Image.open(path).text
    assert sample_script.main([str(unconditional_folder), "--out", str(tmp_path / "one"), "--like", str(path)]) == 0
    difference = np.asarray(Image.open(tmp_path / "one" / "00002.png")).astype(int) - np.asarray(Image.open(path))
    assert np.abs(difference).max() <= 1


def test_what_cannot_be_made_again_is_refused_in_one_line(run_folder, tmp_path, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    (tmp_path / "text.png").write_text("no picture")
    for arguments, message in (
        (["--like", str(tmp_path / "plain.png")], "does not say how it was made (no seed, steps,"),
        (["--like", str(tmp_path / "text.png")], "text.png is not a picture"),
        (["--like", str(tmp_path / "none.png")], "none.png"),
        (["--like", str(tmp_path / "plain.png"), "--seed", "3", "--steps", "2"], "leave out --seed, --steps"),
    ):
        code = sample_script.main([str(run_folder), "--out", str(tmp_path / "out"), *arguments])
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert code == 2 and error.startswith("error: ")
        assert message in error
    assert not (tmp_path / "out").exists()


def test_attention_is_written_beside_each_picture(run_folder, unconditional_folder, tmp_path, capsys):
    for name, extra in (("plain", []), ("shown", ["--attention"])):
        assert call(run_folder, tmp_path / name, "--prompt", "a red heart", "", *extra) == 0
    assert {path.name for path in (tmp_path / "shown").iterdir()} == {
        "00000-a-red-heart.png",
        "00000-a-red-heart-attention.png",
        "00001.png",
        "00001-attention.png",
        "grid.png",
    }
    for path in (tmp_path / "plain").iterdir():
        assert path.read_bytes() == (tmp_path / "shown" / path.name).read_bytes()
    sheet = Image.open(tmp_path / "shown" / "00000-a-red-heart-attention.png")
    assert sheet.width == 4 * (96 + 6) + 6  # the picture and its three words
    assert call(unconditional_folder, tmp_path / "none", "--attention") == 2
    assert "trained without text: it has no attention" in capsys.readouterr().err


def test_two_processes_write_the_same_files(run_folder, tmp_path):
    for name in ("first", "second"):
        command = [sys.executable, str(SCRIPT), str(run_folder), "--prompt", "a heart", "--steps", "2"]
        done = subprocess.run([*command, "--out", str(tmp_path / name)], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"wrote 1 picture and grid.png to {tmp_path / name}\n"
    for first in (tmp_path / "first").iterdir():
        assert first.read_bytes() == (tmp_path / "second" / first.name).read_bytes()


def test_a_model_without_text_needs_no_prompt_and_writes_grey_pictures(unconditional_folder, tmp_path):
    assert (
        call(unconditional_folder, tmp_path, "--num_images", "3", "--height", "8", "--scheduler", "DDPMScheduler") == 0
    )
    found = pictures(tmp_path)
    assert list(found) == ["00000.png", "00001.png", "00002.png"]
    picture = Image.open(found["00001.png"])
    assert picture.mode == "L" and picture.size == (12, 8) and picture.text["scheduler"] == "DDPMScheduler"


def test_the_default_steps_give_way_to_a_model_trained_with_fewer(tmp_path, capsys):
    scheduler = DDIMScheduler(num_train_timesteps=10)
    TextToImagePipeline(tiny_unet(context_dim=None), scheduler).save_pretrained(tmp_path / "run")
    assert sample_script.main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert "note: 10 steps" in capsys.readouterr().err
    assert Image.open(tmp_path / "out" / "00000.png").text["steps"] == "10"
    assert call(tmp_path / "run", tmp_path / "out", "--steps", "11") == 2
    assert "error: num_inference_steps must be at most 10" in capsys.readouterr().err


def test_the_default_steps_give_way_to_what_the_scheduler_has(tmp_path, capsys):
    unet, scheduler = tiny_unet(context_dim=None), DDIMScheduler(num_train_timesteps=7)
    TextToImagePipeline(unet, scheduler, default_steps=7).save_pretrained(tmp_path / "run")
    other = [str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--scheduler", "DPMSolverMultistepScheduler"]
    assert sample_script.main(other) == 0
    assert "note: 6 steps, as DPMSolverMultistepScheduler has no schedule of 7\n" in capsys.readouterr().err
    assert Image.open(tmp_path / "out" / "00000.png").text["steps"] == "6"
    assert sample_script.main([*other, "--steps", "7"]) == 2
    said = capsys.readouterr().err
    assert said == "error: DPMSolverMultistepScheduler has no schedule of 7 steps, take at most 6\n"
    TextToImagePipeline(unet, scheduler, default_steps=3).save_pretrained(tmp_path / "run")
    assert sample_script.main([*other[:-1], "PNDMScheduler"]) == 2  # more than the default is not taken unasked
    assert capsys.readouterr().err == "error: PNDMScheduler has no schedule of 3 steps, take at least 4\n"


def test_a_scheduler_that_does_not_know_the_runs_betas_is_one_line(tmp_path, capsys):
    scheduler = DDPMScheduler(beta_schedule="sigmoid")
    TextToImagePipeline(tiny_unet(context_dim=None), scheduler).save_pretrained(tmp_path / "run")
    assert call(tmp_path / "run", tmp_path / "out", "--scheduler", "DDIMScheduler") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --scheduler DDIMScheduler has no beta_schedule 'sigmoid'") and said.count("\n") == 1
    assert call(tmp_path / "run", tmp_path / "out", "--scheduler", "DDPMScheduler") == 0


def test_steps_and_guidance_are_by_default_the_pipelines_own_and_stand_in_the_metadata(tmp_path, capsys):
    unet, scheduler = tiny_unet(context_dim=None), DDIMScheduler(num_train_timesteps=7)
    TextToImagePipeline(unet, scheduler, default_steps=3, default_guidance_scale=1.5).save_pretrained(tmp_path / "run")
    assert sample_script.main([str(tmp_path / "run"), "--out", str(tmp_path / "own")]) == 0
    assert capsys.readouterr().err.count("note") == 0
    named = ["--steps", "3", "--guidance_scale", "1.5"]
    assert sample_script.main([str(tmp_path / "run"), "--out", str(tmp_path / "named"), *named]) == 0
    own, other = (tmp_path / name / "00000.png" for name in ("own", "named"))
    assert own.read_bytes() == other.read_bytes()
    about = Image.open(own).text
    assert (about["steps"], about["guidance_scale"]) == ("3", "1.5")

    TextToImagePipeline(unet, scheduler, default_steps=5).save_pretrained(tmp_path / "run")
    again = [str(tmp_path / "run"), "--like", str(own), "--out", str(tmp_path / "again")]
    assert sample_script.main(again) == 0  # by the picture's numbers, not by those that the run has now
    assert (tmp_path / "again" / "00000.png").read_bytes() == own.read_bytes()


def test_the_dtype_is_that_of_every_part(run_folder, tmp_path, monkeypatch):
    seen = []
    original = TextToImagePipeline.__call__

    def spy(pipe, *arguments, **options):
        seen.append((pipe.unet.dtype, pipe.text_encoder.dtype))
        return original(pipe, *arguments, **options)

    monkeypatch.setattr(TextToImagePipeline, "__call__", spy)
    assert call(run_folder, tmp_path, "--prompt", "a", "--dtype", "bfloat16") == 0
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert next(iter(pictures(tmp_path).values())).name == "00000-a.png"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "this model needs a prompt"),
        (["--prompt", "a", "--scheduler", "Nonsense"], "--scheduler Nonsense is unknown; choose from FlowMatchEuler"),
        (
            ["--prompt", "a", "--scheduler", "DEISMultistepScheduler"],
            "cannot sample a flow model; choose from FlowMatch",
        ),
        (["--prompt", "a", "--scheduler", "DDIMScheduler"], "cannot sample a flow model"),
        (["--prompt", "a", "--height", "33"], "height must be a positive multiple of 4"),
        (["--prompt", "a", "--dtype", "int8"], "dtype must be"),
        (["--prompt", "a", "--device", "nowhere"], "--device nowhere cannot be used here"),
        (["--prompt", "a", "--device", "meta"], "--device meta cannot be used here"),
        (["--prompt", "a", "--device", "hpu"], "--device hpu cannot be used here"),
        (["--prompt", "a", "b\udcff"], "--prompt 'b\\udcff' is not UTF-8 text"),
        (["--prompt", "a", "--negative_prompt", "\udcff"], "--negative_prompt '\\udcff' is not UTF-8 text"),
        (["--prompt", "a", "--num_images", "0"], "--num_images must be at least 1, got 0"),
        (["--prompt", "a", "--batch_size", "0"], "--batch_size must be at least 1"),
        (["--prompt", "a", "--seed", "-1"], "--seed must be a whole number from 0, got -1"),
        (["--prompt", "a", "b", "--negative_prompt", "x", "y", "z"], "got 3 negative prompts for 2 prompts"),
        (["--prompt", "a", "--guidance_scale", "nan"], "guidance_scale must be a finite number"),
    ],
)
def test_what_does_not_fit_is_one_line_exit_code_two_and_no_file(run_folder, tmp_path, capsys, options, message):
    assert call(run_folder, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "out").exists()


def test_a_wrong_command_line_or_folder_is_one_line(tmp_path, capsys):
    for arguments in ([], [str(tmp_path), "--num_images", "many"], [str(tmp_path), "--unknown"]):
        with pytest.raises(SystemExit) as caught:
            sample_script.main(arguments)
        assert caught.value.code == 2
        assert capsys.readouterr().err.startswith("error: ")
    for folder, message in ((tmp_path / "none", "is no folder"), (tmp_path, "is no saved pipeline")):
        assert call(folder, tmp_path / "out", "--prompt", "a") == 2
        assert message in capsys.readouterr().err


def test_an_out_that_cannot_be_written_is_refused_before_anything_is_loaded(run_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(TextToImagePipeline, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded first"))
    (tmp_path / "file").write_text("not yours")
    for out, message in (
        (tmp_path / "file", "file is a file, and must be a folder"),
        (tmp_path / "file" / "in" / "it", f"cannot be made: {tmp_path / 'file'} is a file"),
        (Path("/proc/none"), "--out /proc/none cannot be written"),
    ):
        assert call(run_folder, out, "--prompt", "a") == 2
        error = capsys.readouterr().err
        assert error.startswith("error: --out ") and message in error and len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "not yours"


def test_no_picture_takes_the_place_of_another_and_the_same_one_is_not_doubled(run_folder, tmp_path, capsys):
    assert call(run_folder, tmp_path, "--prompt", "a", "--attention") == 0
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert call(run_folder, tmp_path, "--prompt", "a", "--attention") == 0
    assert {
        path.name: path.read_bytes() for path in tmp_path.iterdir()
    } == first and "note" not in capsys.readouterr().err

    assert call(run_folder, tmp_path, "--prompt", "a", "--attention", "--guidance_scale", "5") == 0
    assert "note: 1 got other names, as other pictures had theirs: 00000-a-2.png" in capsys.readouterr().err
    (tmp_path / "00001-a.png").write_text("not yours")
    assert call(run_folder, tmp_path, "--prompt", "a", "--num_images", "2") == 0

    names = {path.name for path in tmp_path.iterdir()}
    assert names == first.keys() | {"00000-a-2.png", "00000-a-2-attention.png", "00001-a.png", "00001-a-2.png"}
    assert Image.open(tmp_path / "00000-a-2.png").text["guidance_scale"] == "5.0"
    kept = first.keys() - {"grid.png"}
    assert all((tmp_path / name).read_bytes() == first[name] for name in kept)
    assert (tmp_path / "00001-a.png").read_text() == "not yours"


def test_another_runs_picture_of_the_same_settings_stays(run_folder, tmp_path):
    assert call(run_folder, tmp_path, "--prompt", "a") == 0
    path = tmp_path / "00000-a.png"
    theirs = Image.open(path)
    other = Image.eval(theirs, lambda value: 255 - value)
    other.save(path, pnginfo=sample_script.png_info(theirs.text))
    before = path.read_bytes()

    assert call(run_folder, tmp_path, "--prompt", "a") == 0

    assert path.read_bytes() == before and (tmp_path / "00000-a-2.png").exists()


def test_a_grid_takes_the_place_of_the_last_grid_alone(run_folder, tmp_path, capsys):
    assert call(run_folder, tmp_path, "--prompt", "a", "b") == 0
    assert Image.open(tmp_path / "grid.png").text == {"pictures": "00000-a.png\n00001-b.png"}
    assert call(run_folder, tmp_path, "--prompt", "c") == 0
    assert Image.open(tmp_path / "grid.png").text == {"pictures": "00000-c.png"}
    Image.new("L", (3, 5)).save(tmp_path / "grid.png")
    assert call(run_folder, tmp_path, "--prompt", "c") == 0
    assert "wrote 1 picture and grid-2.png" in capsys.readouterr().out
    assert Image.open(tmp_path / "grid.png").size == (3, 5)


def test_a_full_disk_and_too_large_a_picture_are_one_line_with_the_way_out(run_folder, tmp_path, capsys, monkeypatch):
    assert call(run_folder, tmp_path, "--prompt", "a") == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(image, path, **options):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", full)
        assert call(run_folder, tmp_path, "--prompt", "b") == 2
    message = "00000-b.png could not be written (No space left on device): make room, or give another --out"
    assert capsys.readouterr().err.strip().endswith(message)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    assert call(run_folder, tmp_path, "--prompt", "a", "--height", "12000000", "--width", "12000000") == 2
    assert capsys.readouterr().err.startswith("error: not enough memory: lower --height and --width or --batch_size (")


def test_pictures_that_are_not_finite_are_an_error_and_not_black(tmp_path, capsys):
    unet = tiny_unet(context_dim=None)
    with torch.no_grad():
        unet.conv_out.bias[0] = float("nan")
    TextToImagePipeline(unet, scheduler_for("flow")).save_pretrained(tmp_path / "run")
    assert call(tmp_path / "run", tmp_path / "out") == 2
    assert "error: picture 0 of 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory):
    torch.manual_seed(1)
    size = JudgeSize(image_size=12, patch_size=4, dim=8, depth=1, heads=2, text_dim=8, text_depth=1, embedding_dim=8)
    folder = tmp_path_factory.mktemp("judge")
    Judge(size, train_tokenizer(["red blue"], vocab_size=300, max_length=11)).save(folder)
    return folder


def test_of_several_candidates_the_one_that_the_judge_prefers_is_written(run_folder, judge_folder, tmp_path):
    wanted = ["--prompt", "red", "blue", "--seed", "3"]
    assert call(run_folder, tmp_path / "all", *wanted, "--num_images", "10") == 0
    judge = Judge.load(judge_folder)

    def best(names):
        images = torch.stack([to_tensor(Image.open(tmp_path / "all" / name)) for name in names])
        return names[best_first(judge, images, names[0][6:].removesuffix(".png"))[0]]

    each = list(pictures(tmp_path / "all"))
    expected = [best(each[first : first + 5]) for first in range(0, 20, 5)]

    choosing = ["--best_of", "5", "--judge", str(judge_folder), "--num_images", "2", "--batch_size", "3"]
    assert call(run_folder, tmp_path / "best", *wanted, *choosing) == 0

    assert list(pictures(tmp_path / "best")) == expected
    assert len({int(name[:5]) % 5 for name in expected}) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x", "--best_of", "3"], "--best_of and --judge go together"),
        (["--prompt", "x", "--judge", "nowhere"], "--best_of and --judge go together"),
        (["--prompt", "x", "--best_of", "0"], "--best_of must be at least 1, got 0"),
        (["--best_of", "2", "--judge", "nowhere"], "--best_of needs --prompt"),
        (["--prompt", "x", "--best_of", "2", "--judge", "nowhere"], "nowhere holds no judge"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(run_folder, tmp_path, capsys, options, message):
    assert call(run_folder, tmp_path / "none", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
