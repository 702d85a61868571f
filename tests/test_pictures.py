"""Pictures given to a pipeline, and the pipelines that take them: image to image, inpainting."""

from io import BytesIO

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchLCMScheduler, HeunDiscreteScheduler
from PIL import Image
from pipeline_parts import quiet, scheduler_for, seeds, stub_pipeline, tiny_pipeline, tiny_unconditional
from torch.testing import assert_close

from unet_attn.images import load_image, to_tensor
from unet_attn.objective import Objective
from unet_attn.pipelines.image_to_image import ImageToImagePipeline
from unet_attn.pipelines.inpaint import InpaintPipeline
from unet_attn.pipelines.pictures import noised, read_pictures, spread
from unet_attn.pipelines.text_to_image import TextToImagePipeline

# diffusers' schedulers call numpy in ways that it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BARE = {"channels": 3, "size": (None, None)}


@pytest.fixture(scope="module")
def pipeline():
    return tiny_pipeline()


def test_arrays_and_tensors_of_two_axes_are_grey_and_bools_are_black_and_white():
    mask = pixels(12, 8, 1)[..., 0] > 128
    expected = torch.from_numpy(mask)[None, None].float() * 2 - 1
    options = {"channels": 1, "size": (None, None), "name": "mask_image"}
    tensor = torch.from_numpy(mask)
    for each in (mask, mask[..., None], mask[None, ..., None], mask * 1.0, tensor, tensor.float(), tensor[None, None]):
        assert torch.equal(read_pictures(each, **options), expected)


def pixels(height=12, width=8, channels=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, channels), generator=generator, dtype=torch.uint8).numpy()


# --- reading


def test_every_kind_of_one_picture_is_read_alike(tmp_path):
    array = pixels()
    image = Image.fromarray(array)
    image.save(tmp_path / "picture.png")
    unit = torch.from_numpy(array).permute(2, 0, 1) / 255
    expected = to_tensor(image)[None]
    kinds = (tmp_path / "picture.png", str(tmp_path / "picture.png"), image, array, array / 255.0, unit, [image])
    for each in (*kinds, (array / 255.0)[None].astype(np.float32), unit[None]):
        assert_close(read_pictures(each, **BARE), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_an_open_picture_is_read_as_its_file(mode, tmp_path):
    if mode == "I;16":
        image = Image.fromarray(pixels(channels=1)[..., 0].astype(np.uint16) * 257)
    elif mode == "RGBA":
        image = Image.fromarray(pixels(channels=4), "RGBA")
    else:
        image = Image.fromarray(pixels()).convert(mode)
    suffix = "tif" if mode in ("CMYK", "YCbCr") else "png"
    image.save(tmp_path / f"picture.{suffix}")
    expected = to_tensor(load_image(tmp_path / f"picture.{suffix}"))
    assert_close(read_pictures(image, **BARE)[0], expected, rtol=0, atol=0.05 if mode == "YCbCr" else 0)


def test_what_an_open_picture_hides_stays_hidden_in_every_mode_with_transparency():
    square = np.zeros((2, 3, 4), np.uint8)
    square[..., 1] = 255  # green under an alpha of 0, and of 128 in one pixel
    square[0, 1, 3] = 128
    plain = Image.fromarray(square)
    expected = read_pictures(plain, **BARE)
    assert expected[0, :, 1, 1].tolist() == [1, 1, 1]
    assert_close(expected[0, :, 0, 1], torch.tensor([127, 255, 127]) / 127.5 - 1)
    paletted = plain.convert("RGB").quantize(4).convert("PA")
    paletted.putalpha(plain.getchannel("A"))
    grey = plain.convert("LA")
    assert (paletted.mode, grey.mode) == ("PA", "LA")
    for given, like in ((plain.convert("RGBa"), plain), (paletted, plain), (grey.convert("La"), grey)):
        assert_close(read_pictures(given, **BARE), read_pictures(like, **BARE), rtol=0, atol=0.02)


def test_sixteen_bits_are_read_alike_in_every_mode_and_pixels_of_no_known_range_refused():
    numbers = np.array([[30000, 65535, 0]], np.uint16)
    expected = torch.tensor([117, 255, 0]) / 127.5 - 1
    big = Image.frombytes("I;16B", (3, 1), numbers.astype(">u2").tobytes())
    old = Image.fromarray(numbers.astype(np.int32))
    assert (big.mode, old.mode) == ("I;16B", "I")
    for image in (Image.fromarray(numbers), big, old):
        assert_close(read_pictures(image, channels=1, size=(None, None))[0, 0, 0], expected)
    tiff = BytesIO()
    old.save(tiff, "TIFF")
    for image, number in (
        (Image.fromarray(np.full((2, 3), 0.5, np.float32)), "float"),
        (Image.fromarray(np.full((2, 3), 65536, np.int32)), "integer"),
        (Image.fromarray(np.full((2, 3), -1, np.int32)), "integer"),
        (Image.open(tiff), "integer"),
    ):
        with pytest.raises(ValueError, match=f"mask_image has 32-bit {number} pixels, whose range no one knows: give"):
            read_pictures(image, channels=1, size=(None, None), name="mask_image")


@pytest.mark.parametrize(("size", "said"), [((8.0, 8), "height .* got 8.0"), ((8, 0), "width .* got 0")])
def test_a_size_that_nothing_can_be_scaled_to_is_refused_by_name(size, said):
    with pytest.raises(ValueError, match=said.replace(".*", "must be a whole number of at least 1,")):
        read_pictures(Image.fromarray(pixels(12, 12)), channels=3, size=size)


def test_the_orientation_of_a_photograph_is_heeded():
    file, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels(12, 8)).save(file, "JPEG", exif=exif)
    with Image.open(file) as image:
        assert read_pictures(image, **BARE).shape == (1, 3, 8, 12)


def test_pictures_are_scaled_where_a_size_is_asked_for_and_arrays_are_not():
    image = Image.fromarray(pixels(12, 8))
    assert read_pictures([image, image], channels=3, size=(20, 4)).shape == (2, 3, 20, 4)
    assert read_pictures(image, channels=1, size=(None, 16)).shape == (1, 1, 12, 16)
    with pytest.raises(ValueError, match="image has width 8, not 16: arrays and tensors are not scaled"):
        read_pictures(torch.zeros(3, 12, 8), channels=3, size=(12, 16))


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        ([], "image must be a picture or a list of them"),
        (7, "image must be a file, a PIL picture, an array .* got int"),
        (torch.zeros(8), "got torch.float32 of 1 axes"),
        (torch.zeros(8, 8), "image must have 3 channels, as the U-Net, got 1"),
        (np.zeros((1, 8, 12)), r"image must be an array \(H, W, C\), got \(1, 8, 12\): a tensor may be"),
        (np.zeros((3, 8, 12), np.uint8), r"image must be an array \(H, W, C\), got \(3, 8, 12\)"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), "got torch.int64 of 3 axes"),
        (torch.full((3, 8, 8), -0.5), r"image must hold values in \[0, 1\], got -0.5 to -0.5"),
        (torch.full((3, 8, 8), float("nan")), "got nan to nan"),
        (np.full((8, 8, 3), 200.0), "got 200.0 to 200.0"),
        (torch.zeros(1, 8, 8), "image must have 3 channels, as the U-Net, got 1"),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 8, 12)], "must have one size, got 8 x 8 and 8 x 12"),
        ("nowhere.png", "nowhere.png"),
    ],
)
def test_what_is_no_picture_is_refused_in_one_line(pictures, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_pictures(pictures, **BARE)
    assert "\n" not in str(caught.value)


def test_one_picture_is_for_all_prompts_and_several_are_one_each():
    rows = torch.arange(2.0).reshape(2, 1, 1, 1).expand(2, 3, 4, 4)
    assert spread(rows, prompts=2, images=2)[:, 0, 0, 0].tolist() == [0, 0, 1, 1]
    assert spread(rows[1:], prompts=3, images=1)[:, 0, 0, 0].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="got 2 pictures as image for 3 prompts"):
        spread(rows, prompts=3, images=1)


# --- noise


@pytest.mark.parametrize("prediction_type", ["flow", "epsilon"])
def test_pictures_are_noised_as_in_training(prediction_type):
    scheduler = scheduler_for(prediction_type)
    scheduler.set_timesteps(10)
    clean, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    time = float(scheduler.timesteps[6])
    t = torch.full((2,), time / 1000) if prediction_type == "flow" else torch.full((2,), int(time))
    expected = Objective(scheduler, prediction_type=prediction_type).add_noise(clean, noise, t)
    assert_close(noised(scheduler, clean, noise, 6), expected, rtol=0, atol=1e-5)


def test_the_network_of_a_second_order_scheduler_begins_at_the_level_of_the_noise():
    pipe = ImageToImagePipeline.from_pipe(stub_pipeline("epsilon"))
    picture = torch.full((3, 12, 12), 0.75)
    for scheduler_class in (EulerDiscreteScheduler, HeunDiscreteScheduler):
        pipe.scheduler = scheduler_class.from_config(pipe.scheduler.config)
        pipe.unet.calls.clear()
        pipe(None, picture, strength=0.4, num_inference_steps=10, generator=seeds(3))
        sample, timestep, _ = pipe.unet.calls[0]
        noise = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(3))
        cumulative = pipe.scheduler.alphas_cumprod[int(timestep)]
        assert_close(sample, cumulative.sqrt() * 0.5 + (1 - cumulative).sqrt() * noise, rtol=0, atol=1e-3)


# --- image to image


def test_little_strength_changes_little_and_all_of_it_forgets_the_picture(pipeline):
    pipe = ImageToImagePipeline.from_pipe(pipeline)
    picture = torch.rand(3, 12, 12, generator=torch.Generator().manual_seed(1))
    options = {"num_inference_steps": 20, "generator": seeds(1), "output_type": "pt"}
    changes = []
    for strength in (0.05, 0.5, 1.0):
        found = pipe("a red heart", picture, strength=strength, **{**options, "generator": seeds(1)}).images[0]
        changes.append(float((found - picture).abs().mean()))
    assert changes[0] < 0.1 < changes[1] < changes[2]
    # a flow's first step is noise alone
    plain = pipeline("a red heart", **{**options, "generator": seeds(1)}).images[0]
    assert_close(found, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scheduler_class", [DDIMScheduler, EulerDiscreteScheduler])
def test_all_of_the_strength_forgets_the_picture_whatever_the_first_level_leaves_of_it(scheduler_class):
    pipe = tiny_unconditional("epsilon")
    pipe.scheduler = scheduler_class.from_config(pipe.scheduler.config, timestep_spacing="leading")
    options = {"num_inference_steps": 2, "output_type": "pt"}
    expected = pipe(generator=seeds(1), **options).images
    change = ImageToImagePipeline.from_pipe(pipe)
    found = change(None, torch.ones(3, 12, 12), strength=1, generator=seeds(1), **options).images
    assert torch.equal(found, expected)


def test_each_prompt_has_its_picture_and_is_made_alone_alike(pipeline):
    pipe = ImageToImagePipeline.from_pipe(pipeline)
    pictures = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(1))
    options = {"num_inference_steps": 4, "output_type": "pt"}
    both = pipe(["a", "cloud"], pictures, num_images_per_prompt=2, generator=seeds(1, 2, 3, 4), **options).images
    assert both.shape == (4, 3, 8, 12)
    alone = pipe("cloud", pictures[1], generator=seeds(3), **options).images
    assert_close(alone[0], both[2], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [ImageToImagePipeline, InpaintPipeline])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": 0}, "strength must lie above 0 and at most at 1, got 0"),
        ({"strength": 1.5}, "strength"),
        ({"image": None}, "needs an image"),
        (
            {"image": torch.zeros(3, 9, 12), "mask_image": torch.zeros(1, 9, 12)},
            "height must be a positive multiple of 4",
        ),
        ({"image": torch.zeros(2, 3, 12, 12)}, "got 2 pictures as image for 1 prompts"),
        ({"mask_image": None}, "a mask_image"),
        ({"mask_image": torch.zeros(1, 8, 12)}, r"mask_image has size \(8, 12\), the image \(12, 12\)"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_compute(kind, options, message):
    if kind is ImageToImagePipeline and "mask_image" in options and "image" not in options:
        return
    pipe = kind.from_pipe(stub_pipeline(with_text=True))
    given = {"image": torch.zeros(3, 12, 12), "mask_image": torch.zeros(1, 12, 12), **options}
    if kind is ImageToImagePipeline:
        given.pop("mask_image")
    with pytest.raises(ValueError, match=message):
        pipe("a", **given)
    assert pipe.unet.calls == []


def test_the_steps_that_are_done_are_counted_and_can_be_interrupted(capsys):
    pipe = ImageToImagePipeline.from_pipe(stub_pipeline())
    pipe.set_progress_bar_config(disable=False, ascii=True)
    pipe(None, torch.zeros(3, 12, 12), strength=0.5, num_inference_steps=8)
    assert "4/4" in capsys.readouterr().err

    def stop(caller, step, timestep, values):
        caller._interrupt = step == 5

    pipe.unet.calls.clear()
    pipe(None, torch.zeros(3, 12, 12), strength=0.5, num_inference_steps=8, callback_on_step_end=stop)
    assert len(pipe.unet.calls) == 2


def test_what_the_mask_keeps_stays_when_a_callback_interrupts_or_changes_it():
    pipe = InpaintPipeline.from_pipe(stub_pipeline())
    image, mask = torch.full((3, 12, 12), 0.25), torch.zeros(12, 12)
    mask[4:, 5:] = 1

    def stop(caller, step, timestep, values):
        caller._interrupt = step == 2
        return {"latents": values["latents"] + 0.5}

    found = pipe(None, image, mask, num_inference_steps=7, callback_on_step_end=stop, output_type="pt").images[0]
    assert len(pipe.unet.calls) == 3
    assert torch.equal(found[:, mask == 0], image[:, mask == 0])
    assert (found[:, mask == 1] - 0.25).abs().mean() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("output_type", ["pil", "np", "pt", "latent"])
def test_half_precision_gives_every_type_of_output(dtype, output_type):
    pipe = ImageToImagePipeline.from_pipe(tiny_pipeline().to(dtype))
    images = pipe(
        "a", torch.zeros(3, 12, 12), num_inference_steps=2, generator=seeds(1), output_type=output_type
    ).images
    assert len(images) == 1
    if output_type in ("pt", "latent"):
        assert images.dtype == torch.float32


# --- inpainting


@pytest.mark.parametrize("strength", [0.4, 1.0])
@pytest.mark.parametrize(
    ("prediction_type", "scheduler_class"),
    [
        ("flow", None),
        ("flow", FlowMatchLCMScheduler),
        ("epsilon", DDIMScheduler),
        ("epsilon", HeunDiscreteScheduler),
    ],
)
def test_what_the_mask_keeps_stays_to_the_bit_and_the_rest_is_drawn(prediction_type, scheduler_class, strength):
    pipe = InpaintPipeline.from_pipe(tiny_pipeline(prediction_type))
    if scheduler_class is not None:
        pipe.scheduler = scheduler_class.from_config(pipe.scheduler.config)
    image = Image.fromarray(pixels(12, 12))
    mask = Image.new("L", (12, 12), 0)
    mask.paste(255, (0, 0, 5, 12))
    found = pipe("a", image, mask, strength=strength, num_inference_steps=5, generator=seeds(1)).images[0]
    found, before = np.asarray(found).astype(int), np.asarray(image).astype(int)
    assert (found[:, 5:] == before[:, 5:]).all()
    assert np.abs(found[:, :5] - before[:, :5]).mean() > 10


def test_at_full_strength_what_was_there_does_not_shine_through():
    pipe = InpaintPipeline.from_pipe(tiny_unconditional())
    mask = torch.zeros(1, 12, 12)
    mask[:, :, :8] = 1
    pictures = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    pictures[1, :, :, 8:] = pictures[0, :, :, 8:]
    first, second = (
        pipe(None, each, mask, num_inference_steps=4, generator=seeds(1), output_type="pt").images for each in pictures
    )
    assert torch.equal(first, second)


def test_what_is_drawn_sees_what_is_kept():
    """The network is given, outside the mask, the picture at the noise level of each step."""
    pipe = InpaintPipeline.from_pipe(stub_pipeline())
    mask = torch.zeros(1, 12, 12)
    mask[:, :6] = 1
    pipe(None, torch.full((3, 12, 12), 0.75), mask, num_inference_steps=4, generator=seeds(2))
    noise = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(2))
    for sample, timestep, _ in pipe.unet.calls:
        time = float(timestep) / 1000
        assert_close(sample[:, :, 6:], ((1 - time) * 0.5 + time * noise)[:, :, 6:], rtol=0, atol=1e-5)


# --- one set of parts


def test_pipelines_made_from_one_another_share_their_parts_as_they_are():
    pipe = tiny_pipeline().to(torch.bfloat16)
    other = ImageToImagePipeline.from_pipe(pipe)
    again = TextToImagePipeline.from_pipe(InpaintPipeline.from_pipe(other))
    for name, part in pipe.components.items():
        assert other.components[name] is part and again.components[name] is part
    assert again.unet.dtype == torch.bfloat16
    assert again.config.prediction_type == pipe.config.prediction_type
    options = {"num_inference_steps": 2, "output_type": "pt"}
    assert torch.equal(
        again("a", generator=seeds(1), **options).images, pipe("a", generator=seeds(1), **options).images
    )


def test_a_part_given_to_from_pipe_takes_the_place_of_the_shared_one():
    pipe = tiny_unconditional("epsilon")
    scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    other = ImageToImagePipeline.from_pipe(pipe, scheduler=scheduler)
    assert other.scheduler is scheduler and isinstance(pipe.scheduler, DDIMScheduler)


@pytest.mark.parametrize("kind", [ImageToImagePipeline, InpaintPipeline])
def test_a_saved_pipeline_of_another_kind_loads_as_any(kind, tmp_path):
    pipe = tiny_pipeline()
    kind.from_pipe(pipe).save_pretrained(tmp_path)
    options = {"num_inference_steps": 2, "output_type": "pt"}
    loaded = quiet(TextToImagePipeline.from_pretrained(tmp_path))
    assert torch.equal(
        loaded("a", generator=seeds(1), **options).images, pipe("a", generator=seeds(1), **options).images
    )
    assert isinstance(kind.from_pretrained(tmp_path), kind)
