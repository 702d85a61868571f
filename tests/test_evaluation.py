import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import Tensor, nn
from torchmetrics.image.kid import poly_mmd

from unet_attn.data import to_tensor
from unet_attn.evaluation import (
    check_counts,
    choose_pictures,
    compare_features,
    frechet_distance,
    sample_pictures,
)
from unet_attn.extractors import EfficientNetFeatures, extract_features
from unet_attn.measures import gaussian_distance, kernel_distance
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.text_encoder import TextEncoder
from unet_attn.tokenizer import train_tokenizer
from unet_attn.unet import AttnUNet2D

ROOT = Path(__file__).resolve().parent.parent
CAPTIONS = ["a red square", "a green square", "a blue blob"]


def gaussian_features(mean: Tensor, std: Tensor, count: int, seed: int) -> Tensor:
    """Features (count, F) whose sample mean and covariance are exactly `mean` and diag(std^2)."""
    noise = torch.randn(count, len(mean), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    noise = noise - noise.mean(dim=0)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(noise.T.cov()), noise.T, upper=False).T
    return mean + std * white


def coloured_blobs(count: int, seed: int, *, noise: float = 0.0) -> list[Tensor]:
    """Pictures (3, 11, 13) in [-1, 1]: one colour each, with a bright square somewhere."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.rand(count, 3, 1, 1, generator=generator).expand(-1, -1, 11, 13) - 1
    for picture in (pictures := pictures.clone()):
        top, left = torch.randint(0, 7, (2,), generator=generator).tolist()
        picture[:, top : top + 4, left : left + 5] += 1
    pictures = pictures + noise * torch.randn(pictures.shape, generator=generator)
    return list(pictures.clamp(-1, 1))


def tiny_pipeline(*, with_text: bool) -> TextToImagePipeline:
    """Random weights, 8 x 8 pictures; the last layer, which starts at zero, is given weights too."""
    torch.manual_seed(0)
    unet = AttnUNet2D(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_channels=(8, 16),
        attention_levels=(1,),
        dim_head=8,
        context_dim=16 if with_text else None,
    )
    nn.init.normal_(unet.conv_out.weight, std=0.1)
    tokenizer = train_tokenizer(CAPTIONS) if with_text else None
    text = TextEncoder(vocab_size=len(tokenizer), dim=16, depth=1, heads=2, max_length=32) if with_text else None
    pipeline = TextToImagePipeline(unet, FlowMatchEulerDiscreteScheduler(), text, tokenizer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def captioned_folder(folder: Path, count: int) -> Path:
    """`count` grey pictures of 8 x 8 with captions in metadata.jsonl."""
    folder.mkdir()
    shades = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    for number, shade in enumerate(shades):
        Image.new("L", (8, 8), shade).save(folder / f"{number}.png")
    rows = [{"file_name": f"{number}.png", "text": CAPTIONS[number % len(CAPTIONS)]} for number in range(count)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture
def evaluate_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return import_module("evaluate")


def run_evaluate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "evaluate.py", *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True)


@pytest.fixture(scope="module")
def extractor() -> EfficientNetFeatures:
    return EfficientNetFeatures()


def test_the_frechet_distance_of_two_known_gaussians_is_exact() -> None:
    mean_a = torch.tensor([0.0, 1.0, -2.0, 5.0, 0.5], dtype=torch.float64)
    mean_b = torch.tensor([1.0, 1.0, 0.0, 4.0, 0.5], dtype=torch.float64)
    std_a = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=torch.float64)
    std_b = torch.tensor([1.5, 2.0, 1.0, 1.0, 0.1], dtype=torch.float64)
    # diagonal covariances: |mean_a - mean_b|^2 + |std_a - std_b|^2 = (1 + 4 + 1) + (.25 + .25 + 4 + 1.96)
    expected = 12.46

    a, b = gaussian_features(mean_a, std_a, 67, seed=0), gaussian_features(mean_b, std_b, 71, seed=1)

    assert frechet_distance(a, b) == pytest.approx(expected, abs=1e-9)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)


def test_kid_and_the_frechet_distance_are_torchmetrics() -> None:
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(67, 5, dtype=torch.float64, generator=generator)
    sampled = torch.randn(67, 5, dtype=torch.float64, generator=generator) + 0.5

    expected = poly_mmd(real, sampled)  # of as many of both

    assert kernel_distance(real, sampled).value == pytest.approx(expected.item(), rel=1e-9)
    assert gaussian_distance(real, sampled).value == pytest.approx(frechet_distance(real, sampled), rel=1e-9)


def test_real_against_real_is_about_zero_and_noise_raises_both_distances(extractor: EfficientNetFeatures) -> None:
    real = extract_features(coloured_blobs(71, seed=0), extractor)
    more_real = extract_features(coloured_blobs(71, seed=1), extractor)
    little_noise = extract_features(coloured_blobs(71, seed=1, noise=0.05), extractor)
    much_noise = extract_features(coloured_blobs(71, seed=1, noise=0.3), extractor)

    same, little, much = (compare_features(real, other) for other in (more_real, little_noise, much_noise))

    assert abs(same.kid) < 2 * same.kid_error
    assert little.kid > 3 * same.kid_error
    assert same.kid < little.kid < much.kid
    assert same.frechet < little.frechet < much.frechet
    assert (same.real_pictures, same.sampled_pictures) == (71, 71)


@pytest.mark.parametrize("counts", [(83, 67), (67, 83)])
def test_precision_and_recall_are_of_as_many_real_pictures_as_sampled_ones(counts: tuple[int, int]) -> None:
    real, sampled = torch.randn(150, 5, generator=torch.Generator().manual_seed(0)).split(counts)
    made_for = torch.arange(counts[1]) % counts[0]

    few = compare_features(real[:67], sampled[:67], made_for=made_for[:67])
    many = compare_features(real, sampled, made_for=made_for)

    assert (few.precision, few.recall) == (many.precision, many.recall)
    assert few.kid != many.kid and few.frechet_error != many.frechet_error
    assert (many.real_pictures, many.sampled_pictures) == counts


def test_too_few_pictures_are_refused_with_the_number_needed() -> None:
    with pytest.raises(ValueError, match=r"^63 real pictures are too few to measure a distance: 64 are needed$"):
        check_counts(real=63, sampled=64)
    with pytest.raises(ValueError, match=r"^2 sampled pictures are too few"):
        compare_features(torch.zeros(64, 3), torch.zeros(2, 3))


def test_pictures_are_chosen_by_the_seed_and_begin_again_at_the_end() -> None:
    chosen = choose_pictures(5, 13, seed=3)

    assert sorted(chosen[:5]) == list(range(5))
    assert chosen[5:10] == chosen[:5] and chosen[10:] == chosen[:3]
    assert choose_pictures(5, 13, seed=3) == chosen != choose_pictures(5, 13, seed=4)
    assert choose_pictures(5, 3, seed=3) == chosen[:3]


@pytest.mark.parametrize("with_text", [True, False])
def test_each_sampled_picture_is_its_seeds_whatever_the_batch(with_text: bool) -> None:
    pipeline = tiny_pipeline(with_text=with_text)
    options = {"num_inference_steps": 2, "guidance_scale": 2.0}

    together = list(sample_pictures(pipeline, CAPTIONS, seed=5, **options))
    apart = list(sample_pictures(pipeline, CAPTIONS, seed=5, batch_size=2, **options))
    prompt = CAPTIONS[2] if with_text else None
    last = pipeline(prompt, generator=torch.Generator().manual_seed(7), **options).images[0]

    assert [picture.shape for picture in together] == [(1, 8, 8)] * 3
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, atol=1.01 / 127.5, rtol=0)  # a step of 8 bits where rounding tips over
    torch.testing.assert_close(together[2], to_tensor(last), atol=1.01 / 127.5, rtol=0)


def test_the_script_measures_a_saved_run_and_writes_what_it_did(tmp_path: Path) -> None:
    tiny_pipeline(with_text=True).save_pretrained(tmp_path / "run")
    data = captioned_folder(tmp_path / "data", 67)

    done = run_evaluate(tmp_path / "run", "--data.path", data, "--num_pictures", "71", "--steps", "2", "--seed", "3")

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "evaluation.json").read_text(encoding="utf-8"))
    assert (report["real_pictures"], report["sampled_pictures"]) == (67, 71)
    assert (report["seeds"], report["steps"], report["guidance_scale"]) == ([3, 73], 2, 3.0)
    assert report["kid"] > 0 and report["frechet"] > 0
    assert report["extractor"].startswith("EfficientNet-Lite0")
    assert f"Frechet distance         {report['frechet']:.2f} +- {report['frechet_error']:.2f}" in done.stdout
    assert 0 <= report["precision"] <= 1 and 0 <= report["recall"] <= 1
    assert report["loss"]["pictures"] == 67 and report["loss"]["true"]["error"] > 0
    assert report["loss"]["gap_exchanged"] == {"value": 0, "error": 0}  # new attention adds nothing yet
    assert report["loss"]["on_training_data"] is None and "copies" in report
    assert set(report["seconds"]) == {"loss", "sampling", "features", "measures"}
    assert "Loss by noise level, 67 pictures" in (tmp_path / "run" / "evaluation.svg").read_text(encoding="utf-8")


def test_the_script_refuses_in_one_line_before_it_samples(tmp_path: Path) -> None:
    tiny_pipeline(with_text=True).save_pretrained(tmp_path / "run")
    data = captioned_folder(tmp_path / "data", 5)

    few = run_evaluate(tmp_path / "run", "--data.path", data)
    no_run = run_evaluate(tmp_path / "absent", "--data.path", data)

    assert (few.returncode, no_run.returncode) == (2, 2)
    assert few.stderr.splitlines() == ["error: 5 real pictures are too few to measure a distance: 64 are needed"]
    assert len(no_run.stderr.splitlines()) == 1 and "absent" in no_run.stderr
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_the_script_names_a_missing_package_with_the_extra_that_brings_it(
    evaluate_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "unet_attn.pipelines.text_to_image", None)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "run", "--data.path", "data"])

    assert evaluate_script.main() == 2
    assert capsys.readouterr().err == (
        "error: unet_attn.pipelines.text_to_image is not installed: pip install 'unet-attn[train,eval]'\n"
    )
