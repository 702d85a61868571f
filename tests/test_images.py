"""The one decoding path: every kind of picture that people have comes out upright, opaque, 8 bit, with its values."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from unet_attn.data import ImageError, load_image, resize_and_crop, to_tensor


def noise_picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture that no codec can shrink to nothing."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def decoded(data: bytes, channels: int = 3, background: str = "white") -> np.ndarray:
    return np.asarray(load_image(io.BytesIO(data), channels=channels, background=background))


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("1", 1, (255, 255, 255)),
        ("1", 0, (0, 0, 0)),
        ("L", 200, (200, 200, 200)),
        ("LA", (200, 255), (200, 200, 200)),
        ("LA", (7, 0), (255, 255, 255)),
        ("RGB", (3, 5, 7), (3, 5, 7)),
        ("RGBA", (0, 255, 0, 0), (255, 255, 255)),
        ("RGBA", (255, 0, 0, 128), (255, 127, 127)),
        ("I;16", 65535, (255, 255, 255)),
        ("I;16", 25700, (100, 100, 100)),
        ("I;16", 200, (1, 1, 1)),
    ],
)
def test_every_png_mode_gives_its_colour_on_white(mode: str, value: object, expected: tuple[int, int, int]) -> None:
    pixels = decoded(encoded(Image.new(mode, (5, 3), value)))
    assert pixels.shape == (3, 5, 3)
    np.testing.assert_allclose(pixels, np.broadcast_to(expected, (3, 5, 3)), atol=1)


def test_grey_and_colour_models_both_read_grey_and_colour_files() -> None:
    for mode in ("L", "LA", "1", "RGB", "RGBA", "P"):
        picture = encoded(Image.new("RGB", (5, 3), (200, 200, 200)).convert(mode))
        grey, colour = decoded(picture, channels=1), decoded(picture, channels=3)
        assert grey.shape == (3, 5) and colour.shape == (3, 5, 3)
        np.testing.assert_array_equal(colour, np.repeat(grey[..., None], 3, axis=2))


def test_palette_transparency_shows_the_background_and_not_the_hidden_colour() -> None:
    image = Image.new("P", (5, 3), 1)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((0, 0), 0)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=1)
    pixels = decoded(buffer.getvalue())
    assert tuple(pixels[0, 0]) == (255, 0, 0)
    assert tuple(pixels[1, 1]) == (255, 255, 255)


@pytest.mark.parametrize(("mode", "key", "other"), [("L", 7, 9), ("RGB", (1, 2, 3), (4, 5, 6)), ("I;16", 512, 5140)])
def test_a_transparent_colour_of_a_png_shows_the_background(mode: str, key: object, other: object) -> None:
    image = Image.new(mode, (5, 3), key)
    image.putpixel((0, 0), other)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=key)
    pixels = decoded(buffer.getvalue(), background="#0000ff")
    assert tuple(pixels[1, 1]) == (0, 0, 255)
    assert tuple(pixels[0, 0]) == (other if mode == "RGB" else (9, 9, 9) if mode == "L" else (20, 20, 20))


def png(depth: int, colour_type: int, row: bytes, transparent: bytes) -> bytes:
    """A picture of one row of pixels, with a transparent colour."""
    width = 8 * len(row) // (depth * (3 if colour_type == 2 else 1))
    head = struct.pack(">IIBBBBB", width, 1, depth, colour_type, 0, 0, 0)
    parts = [(b"IHDR", head), (b"tRNS", transparent), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("depth", "colour_type", "row", "transparent", "expected"),
    [
        (1, 0, [0b01010101], [0], [9, 255] * 4),
        (2, 0, [0b00011011], [1], [0, 9, 170, 255]),
        (2, 0, [0b00011011], [5], [0, 9, 170, 255]),  # higher bits are to be ignored
        (4, 0, [0x05, 0xAF], [5], [0, 9, 170, 255]),
        (8, 0, [5, 85], [5], [9, 85]),
        (16, 0, [0, 0, 0x55, 0x55], [0x5555], [0, 9]),
        (16, 2, [0, 0, 19, 136, 0, 0, 0, 0, 20, 136, 0, 0], [0, 5000, 0], [(9, 9, 9), (0, 20, 0)]),
    ],
)
def test_the_transparent_colour_of_a_png_is_understood_in_every_depth(
    depth: int, colour_type: int, row: list[int], transparent: list[int], expected: list
) -> None:
    data = png(depth, colour_type, bytes(row), struct.pack(f">{len(transparent)}H", *transparent))
    pixels = decoded(data, background="#090909")
    np.testing.assert_array_equal(pixels[0], [value if isinstance(value, tuple) else [value] * 3 for value in expected])


def test_cmyk_becomes_the_colour_that_was_meant() -> None:
    pixels = decoded(encoded(Image.new("RGB", (16, 16), (255, 0, 0)).convert("CMYK"), "JPEG"))
    np.testing.assert_allclose(pixels, np.broadcast_to((255, 0, 0), (16, 16, 3)), atol=3)


def test_sixteen_bit_grey_of_a_tiff_and_a_pgm_is_scaled_and_not_clipped() -> None:
    ramp = np.array([[0, 257, 12850, 65535]], dtype=np.uint16)
    for data in (encoded(Image.fromarray(ramp), "TIFF"), b"P5 4 1 65535\n" + ramp.astype(">u2").tobytes()):
        np.testing.assert_array_equal(decoded(data, channels=1), [[0, 1, 50, 255]])


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_gives_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], duration=50)
    np.testing.assert_allclose(decoded(buffer.getvalue())[4, 4], (255, 0, 0), atol=3)


def tiff(image: Image.Image, tag: int, value: int) -> bytes:
    """Uncompressed, with another value of a tag: 258 is bits per pixel, 262 photometric interpretation."""
    data = encoded(image, "TIFF")
    at = data.index(struct.pack("<HHI", tag, 3, 1)) + 8
    return data[:at] + struct.pack("<H", value) + data[at + 2 :]


def test_grey_tiffs_of_other_bits_or_with_white_as_zero_are_understood() -> None:
    twelve = Image.frombytes("I;16", (2, 1), bytes([0xFF, 0xF0, 0x00, 0]))  # 4095 and 0
    np.testing.assert_array_equal(decoded(tiff(twelve, 258, 12), channels=1), [[255, 0]])
    ramp = Image.fromarray(np.array([[0, 257, 65535]], dtype=np.uint16))
    np.testing.assert_array_equal(decoded(tiff(ramp, 262, 0), channels=1), [[255, 254, 0]])


def test_pixels_are_refused_whose_range_nobody_knows() -> None:
    whole, half = Image.new("I", (5, 3), 7), Image.new("F", (5, 3), 0.5)
    for data, said in (
        (encoded(half, "TIFF"), "has 32-bit float"),
        (encoded(whole, "TIFF"), "has 32-bit integer"),
        (tiff(whole, 258, 16), "has 16-bit signed integer"),
    ):
        with pytest.raises(ImageError, match=f"{said} pixels, whose range no one knows"):
            decoded(data)


# The transformation that a camera with this orientation tag has already applied to the upright picture.
CAMERA = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.swapaxes(0, 1),
    6: lambda upright: np.rot90(upright, 1),
    7: lambda upright: upright[::-1, ::-1].swapaxes(0, 1),
    8: lambda upright: np.rot90(upright, -1),
}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(10))
def test_pictures_stand_upright_whatever_the_camera_held(kind: str, orientation: int) -> None:
    upright = np.zeros((40, 24, 3), np.uint8)
    upright[:20, :, 0] = 255  # the top is red, the bottom blue
    upright[20:, :, 2] = 255
    upright[:, :8, 1] = 255  # and the left differs from the right
    stored = np.ascontiguousarray(CAMERA.get(orientation, CAMERA[1])(upright))
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.fromarray(stored).save(buffer, kind, exif=exif, **({"quality": 95} if kind in ("JPEG", "WEBP") else {}))
    pixels = decoded(buffer.getvalue())
    assert pixels.shape == (40, 24, 3)
    assert np.abs(pixels.astype(int) - upright).mean() < 8


def test_a_sideways_phone_photo_is_turned_before_it_is_cropped() -> None:
    image = Image.new("RGB", (40, 20), (255, 0, 0))
    image.paste((0, 0, 255), (20, 0, 40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    upright = load_image(buffer)
    assert upright.size == (20, 40)
    square = np.asarray(resize_and_crop(upright, 10))
    assert square[1, 5, 0] > 200 > 50 > square[1, 5, 2]
    assert square[8, 5, 2] > 200 > 50 > square[8, 5, 0]


def test_damaged_exif_data_does_not_cost_the_picture() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 8), (255, 0, 0)).save(buffer, "JPEG", exif=b"Exif\0\0MM\0*\0\0\xff\xff garbage")
    assert decoded(buffer.getvalue()).shape == (8, 16, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000"])
@pytest.mark.parametrize("kept", [0.05, 0.3, 0.6, 0.9])
def test_a_truncated_picture_is_named_and_never_read_as_grey_smear(tmp_path: Path, kind: str, kept: float) -> None:
    data = encoded(noise_picture(61, 83), kind)
    path = tmp_path / "cut.img"
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(ImageError, match=r"cut\.img"):
        load_image(path)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_a_jpeg_whose_end_was_never_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "half.jpg"
    pixels = np.random.default_rng(0).integers(0, 256, (97, 89, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    data = path.read_bytes()
    path.write_bytes(data + bytes(500))  # zeros behind a whole picture are harmless
    load_image(path)
    path.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))
    with pytest.raises(ImageError, match=r"half\.jpg.*its end is zeros"):
        load_image(path)


HALF_WRITTEN = [
    ("MPO", "RGB", {"save_all": True, "append_images": [Image.new("RGB", (16, 16))]}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGBA", {}),
    ("WEBP", "RGB", {"lossless": True}),
    ("AVIF", "RGB", {}),
]


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.8])
@pytest.mark.parametrize(("kind", "mode", "options"), HALF_WRITTEN)
def test_no_format_whose_end_was_never_written_is_read_as_grey_or_garbage(
    kind: str, mode: str, options: dict, kept: float
) -> None:
    image = noise_picture(89, 97, mode)
    if mode == "RGBA":
        image.putpixel((0, 0), (0, 0, 0, 0))  # else the file has no transparency
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    data = buffer.getvalue()
    np.testing.assert_array_equal(decoded(data + bytes(500)), decoded(data))  # zeros behind a whole picture
    with pytest.raises(ImageError, match="its end is zeros"):
        decoded(data[: int(kept * len(data))].ljust(len(data), b"\0"))


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize(
    ("above", "options", "zeros"),
    [
        ("black", {"method": 4}, 64),
        ("noise", {"method": 0}, 5000),
        ("ramp", {"lossless": True, "method": 0}, 20000),
    ],
)
def test_a_whole_webp_that_ends_in_zeros_is_read(above: str, options: dict, zeros: int, moving: bool) -> None:
    pixels = np.zeros((1024, 1024, 3) if above == "black" else (512, 512, 3), np.uint8)
    if above == "noise":
        pixels[:128] = np.random.default_rng(0).integers(0, 256, (128, 512, 3))
    elif above == "ramp":
        pixels[:128] = (np.add.outer(np.arange(128), np.arange(512)) % 256)[..., None]
    image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    frames = {"save_all": True, "append_images": [image.rotate(180)], "minimize_size": False} if moving else {}
    image.save(buffer, "WEBP", **options, **frames)
    data = buffer.getvalue()
    assert bytes(zeros) in data and (moving or not any(data[-zeros:]))
    for whole in (data, data + bytes(500)):
        np.testing.assert_allclose(decoded(whole)[140:], 0, atol=3)


def test_metadata_that_end_in_zeros_do_not_make_a_whole_avif_damaged() -> None:
    exif = b"MM\0*\0\0\0\x08\0\0\0\0\0\0" + b"padded" + bytes(200)
    buffer = io.BytesIO()
    noise_picture(31, 17).save(buffer, "AVIF", exif=exif)
    data = buffer.getvalue()
    begin = data.index(exif) - 4  # with the offset of its header
    assert data.count(struct.pack(">I", begin)) == 1
    item = data[begin : begin + 4 + len(exif)]
    moved = data.replace(struct.pack(">I", begin), struct.pack(">I", len(data) + 8))  # as programs that put it last
    moved += struct.pack(">I", 8 + len(item)) + b"mdat" + item
    np.testing.assert_array_equal(decoded(moved), decoded(data))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"shopping list: milk, eggs\n", "not a picture"),
        (b"<!DOCTYPE html><html>404</html>", "not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
    ],
)
def test_a_file_that_is_no_picture_is_named_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a b.jpg"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=f"a b.jpg: .*{reason}"):
        load_image(path)


def test_a_pipe_and_a_dangling_link_are_named_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(ImageError, match=r"pipe\.png: is not a regular file"):
        load_image(tmp_path / "pipe.png")
    with pytest.raises(ImageError, match=r"link\.png: No such file"):
        load_image(tmp_path / "link.png")


def test_too_many_pixels_are_refused_and_the_limit_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(noise_picture(61, 83, "L"))
    with pytest.raises(ImageError, match="61 x 83 pixels, more than max_pixels 5000"):
        load_image(io.BytesIO(data), max_pixels=5000)
    assert load_image(io.BytesIO(data), max_pixels=5063).size == (61, 83)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # so that this picture is a bomb to Pillow
    with pytest.raises(ImageError, match="max_pixels"):
        load_image(io.BytesIO(data))
    assert load_image(io.BytesIO(data), max_pixels=6000).size == (61, 83)
    assert Image.MAX_IMAGE_PIXELS == 1000


def test_unknown_channels_and_colours_are_refused() -> None:
    data = encoded(noise_picture(5, 3))
    with pytest.raises(ValueError, match=r"channels must be 1 .* got 4"):
        load_image(io.BytesIO(data), channels=4)
    with pytest.raises(ValueError, match=r"background must be a colour .* 'whitish'"):
        load_image(io.BytesIO(data), background="whitish")


def test_black_is_exactly_minus_one_and_white_exactly_one() -> None:
    tensor = to_tensor(np.array([[0, 255, 200]], dtype=np.uint8))
    assert tensor.shape == (1, 1, 3) and tensor.dtype == torch.float32
    assert tensor[0, 0, :2].tolist() == [-1.0, 1.0]
    assert tensor[0, 0, 2].item() == pytest.approx(200 / 127.5 - 1, abs=1e-6)
    assert to_tensor(Image.new("RGB", (7, 5), (0, 0, 255)))[:, 0, 0].tolist() == [-1.0, -1.0, 1.0]
    with pytest.raises(ValueError, match="uint8"):
        to_tensor(np.zeros((3, 5), np.float32))
    for mode in ("1", "P", "LA", "RGBA", "CMYK"):
        with pytest.raises(ValueError, match=f"mode L or RGB, as load_image gives, got mode {mode}"):
            to_tensor(Image.new(mode, (7, 5)))


def test_the_crop_takes_the_middle_of_the_longer_side() -> None:
    image = Image.new("L", (33, 11), 0)
    image.paste(255, (11, 0, 22, 11))
    assert np.asarray(resize_and_crop(image, 11)).min() == 255
    assert np.asarray(resize_and_crop(image.transpose(Image.Transpose.ROTATE_90), 11)).min() == 255


def test_random_crops_come_from_the_generator_and_reach_both_ends() -> None:
    image = Image.fromarray(np.tile(np.arange(55, dtype=np.uint8), (11, 1)))
    firsts = {
        int(np.asarray(resize_and_crop(image, 11, "random", torch.Generator().manual_seed(seed)))[0, 0])
        for seed in range(300)
    }
    assert firsts == set(range(45))
    again = [resize_and_crop(image, 11, "random", torch.Generator().manual_seed(3)).tobytes() for _ in range(2)]
    assert again[0] == again[1]


def test_shrinking_averages_instead_of_skipping_pixels() -> None:
    stripes = Image.fromarray(np.tile(np.array([0, 255], np.uint8), (64, 32)))
    shrunk = np.asarray(resize_and_crop(stripes, 8)).astype(int)
    assert np.abs(shrunk[:, 1:-1] - 127.5).max() < 10


@pytest.mark.parametrize("crop", ["center", "random"])
def test_a_picture_one_pixel_high_is_read_in_bounded_memory(crop: str) -> None:
    square = resize_and_crop(Image.new("L", (100_000, 1), 77), 13, crop)
    assert square.size == (13, 13) and square.getextrema() == (77, 77)


@pytest.mark.parametrize(
    ("content", "kind", "reason"),
    [
        ("AVIF", "damaged picture", "is damaged at its beginning"),
        (b"\0\0\0\x20ftypavis\0\0\0\0", "damaged picture", "is damaged at its beginning"),
        (b"\0\0\0\x20ftypheic\0\0\0\0mif1", "unsupported pixels", "is a HEIC picture, which is not read: convert"),
        (b"\0\0\0\x20ftypmp42\0\0\0\0isom", "not a picture", "is not a picture (it begins with b"),
    ],
)
def test_files_of_the_family_of_avif_are_told_apart(content: str | bytes, kind: str, reason: str) -> None:
    if content == "AVIF":
        whole = io.BytesIO()
        Image.new("RGB", (31, 17), "red").save(whole, "AVIF")
        content = whole.getvalue()[:200]
    with pytest.raises(ImageError) as caught:
        load_image(io.BytesIO(content))
    assert caught.value.kind == kind and caught.value.reason.startswith(reason)
