"""Pictures that a caller has opened: read as their files are, and named where they cannot be."""

import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from unet_attn.pipelines.pictures import read_pictures

BARE = {"channels": 3, "size": (None, None)}


def noise(width: int = 61, height: int = 83) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str) -> bytes:
    file = BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "PPM"])
def test_an_open_picture_that_is_cut_off_is_named_as_its_file_is(kind: str, tmp_path: Path) -> None:
    path, data = tmp_path / "cut.img", encoded(noise(), kind)
    path.write_bytes(data[: 3 * len(data) // 4])
    with Image.open(path) as image, pytest.raises(ValueError, match=r"cut\.img: .") as caught:
        read_pictures(image, **BARE)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"cut\.img: cannot be read \(.+\)"):  # closed
        read_pictures(image, **BARE)
    with pytest.raises(ValueError, match=r"mask_image: ."):  # no file, no name
        read_pictures(Image.open(BytesIO(path.read_bytes())), name="mask_image", **BARE)


def test_an_open_jpeg_whose_end_was_never_written_is_refused_as_its_file_is(tmp_path: Path) -> None:
    path, data = tmp_path / "half.jpg", encoded(noise(), "JPEG")
    path.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))
    with pytest.raises(ValueError, match=r"half\.jpg: is damaged: its end is zeros"):
        read_pictures(Image.open(path), **BARE)


def test_an_open_picture_with_damaged_exif_data_is_read() -> None:
    file = BytesIO()
    noise().save(file, "JPEG", exif=b"Exif\0\0MM\0*\0\0\xff\xff garbage")
    assert read_pictures(Image.open(file), **BARE).shape == (1, 3, 83, 61)


def png(depth: int, colour_type: int, row: bytes, transparent: bytes) -> bytes:
    """A picture of one row of pixels, with a transparent colour."""
    width = 8 * len(row) // (depth * (3 if colour_type == 2 else 1))
    head = struct.pack(">IIBBBBB", width, 1, depth, colour_type, 0, 0, 0)
    parts = [(b"IHDR", head), (b"tRNS", transparent), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    chunks = [struct.pack(">I", len(data)) + kind + data + zlib.crc32(kind + data).to_bytes(4) for kind, data in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    "data",
    ids=["2 bit", "4 bit", "16 bit"],
    argvalues=[
        png(2, 0, b"\x1b", b"\0\1"),
        png(4, 0, b"\x05\xaf", b"\0\5"),
        png(16, 2, bytes([0, 0, 19, 136, 0, 0, 0, 0, 20, 136, 0, 0]), b"\0\0\x13\x88\0\0"),
    ],
)
def test_the_transparent_colour_of_an_open_png_shows_white_as_that_of_its_file(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(data)
    expected = read_pictures(tmp_path / "picture.png", **BARE)
    assert (expected == 1).all(dim=1).sum() >= 1
    for image in (Image.open(tmp_path / "picture.png"), Image.open(BytesIO(data))):
        assert torch.equal(read_pictures(image, **BARE), expected)
        assert torch.equal(read_pictures(image, **BARE), expected)  # and is left as it was
        image.load()


def test_what_a_caller_has_changed_is_not_undone() -> None:
    frames = BytesIO()
    Image.new("RGB", (8, 8), "red").save(
        frames, "TIFF", save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")]
    )
    second = Image.open(frames)
    second.seek(1)
    assert_close(read_pictures(second, **BARE)[0, :, 0, 0], torch.tensor([-1.0, -1.0, 1.0]))

    draft = Image.open(BytesIO(encoded(noise(64, 96), "JPEG")))
    draft.draft("RGB", (16, 24))
    assert read_pictures(draft, **BARE).shape == (1, 3, 24, 16)

    photo, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6
    noise().save(photo, "JPEG", exif=exif)
    turned = Image.open(photo)
    turned.getexif()[0x0112] = 1
    assert read_pictures(turned, **BARE).shape == (1, 3, 83, 61)

    keyed = Image.open(BytesIO(encoded(Image.new("RGB", (5, 3), (0, 0, 255)), "PNG")))
    keyed.info["transparency"] = (0, 0, 255)
    assert (read_pictures(keyed, **BARE) == 1).all()

    painted = Image.open(BytesIO(encoded(noise(), "PNG")))
    painted.paste("red", (0, 0, 61, 83))
    assert_close(read_pictures(painted, **BARE)[0, :, 40, 30], torch.tensor([1.0, -1.0, -1.0]))
