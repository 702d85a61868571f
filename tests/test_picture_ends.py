"""Where a picture ends: what is appended to a whole one does not count, and what was never written is noticed."""

import io

import numpy as np
import pytest
from PIL import Image

from unet_attn.images import UNWRITTEN, ImageError, load_image


def box(kind: bytes, content: bytes) -> bytes:
    return (8 + len(content)).to_bytes(4, "big") + kind + content


VIDEO = box(b"ftyp", b"isom" + bytes(4)) + box(b"mdat", bytes(range(1, 256))) + box(b"free", bytes(300))
APPENDED = {
    "a video": VIDEO,
    "a video of zeros": box(b"ftyp", b"isom" + bytes(4)) + box(b"mdat", bytes(300)),
    "a video in a box": box(b"mpvd", VIDEO),
    "a trailer": b"trailer" + bytes(100),
    "zeros": bytes(500),
}


def noise(width: int, height: int) -> Image.Image:
    """A picture whose data hold every byte, escaped ones too."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def thumbnail() -> bytes:
    """EXIF data with a whole JPEG in it, as cameras write."""
    small = io.BytesIO()
    noise(16, 16).save(small, "JPEG")
    return b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0" + small.getvalue()


JPEGS = {
    "baseline": ("JPEG", {}),
    "progressive": ("JPEG", {"progressive": True}),
    "restarts": ("JPEG", {"restart_marker_rows": 1}),
    "thumbnail": ("JPEG", {"exif": thumbnail()}),
    "frames": ("MPO", {"save_all": True, "append_images": [noise(16, 16)]}),
}


def jpeg(name: str) -> bytes:
    kind, options = JPEGS[name]
    buffer = io.BytesIO()
    noise(89, 97).save(buffer, kind, **options)
    return buffer.getvalue()


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(load_image(io.BytesIO(data)))


@pytest.mark.parametrize("appended", APPENDED)
@pytest.mark.parametrize("name", JPEGS)
def test_what_follows_the_end_of_a_jpeg_does_not_count(name: str, appended: str) -> None:
    whole = jpeg(name)
    np.testing.assert_array_equal(decoded(whole + APPENDED[appended]), decoded(whole))


@pytest.mark.parametrize("name", JPEGS)
def test_a_jpeg_cut_off_anywhere_and_filled_with_zeros_is_refused(name: str) -> None:
    whole = jpeg(name)
    begin = whole.rindex(b"\xff\xda") if name != "frames" else whole.index(b"\xff\xda")  # of the last scan
    end = whole.index(b"\xff\xd9", begin)
    for cut in (begin + 200, (begin + end) // 2, end - 8, end, end + 1):
        for zeros in (max(0, end + 2 - len(whole)), UNWRITTEN):  # in place of what is missing, and more
            with pytest.raises(ImageError, match=r"its end is zeros|is truncated"):
                decoded(whole[:cut].ljust(len(whole) + zeros, b"\0"))


@pytest.mark.parametrize("number", range(1, 10))
def test_a_progressive_jpeg_without_its_last_scans_is_refused(number: int) -> None:
    whole = jpeg("progressive")
    scans = whole.split(b"\xff\xda")
    assert len(scans) == 11  # with the header
    with pytest.raises(ImageError, match=r"its end is zeros|is truncated"):
        decoded(b"\xff\xda".join(scans[: number + 1]).ljust(len(whole) + UNWRITTEN, b"\0"))


SMOOTH = noise(8, 8).resize((64, 64), Image.Resampling.BICUBIC)
PNGS = {"still": {}, "moving": {"save_all": True, "append_images": [SMOOTH.rotate(180)]}}


def png(name: str) -> bytes:
    buffer = io.BytesIO()
    SMOOTH.save(buffer, "PNG", **PNGS[name])
    return buffer.getvalue()


@pytest.mark.parametrize("appended", APPENDED)
@pytest.mark.parametrize("name", PNGS)
def test_what_follows_the_end_of_a_png_does_not_count(name: str, appended: str) -> None:
    np.testing.assert_array_equal(decoded(png(name) + APPENDED[appended]), np.asarray(SMOOTH))


@pytest.mark.parametrize("zeros", [0, 12, 1000])
@pytest.mark.parametrize(
    ("missing", "said"), [(0, "its end is"), (1, "fit their"), (40, "fit their"), (2000, "fit their")]
)
def test_a_png_whose_end_was_never_written_or_is_another_is_refused(missing: int, said: str, zeros: int) -> None:
    whole = png("still")
    end = whole.index(b"IEND") - 4  # behind the last checksum of the pixels
    with pytest.raises(ImageError, match=f"is damaged: .*{said}") as caught:
        decoded(whole[: end - missing] + bytes(missing + zeros))
    assert caught.value.kind == "damaged picture"


@pytest.mark.parametrize("appended", APPENDED)
def test_what_follows_the_boxes_of_an_avif_does_not_count(appended: str) -> None:
    buffer = io.BytesIO()
    noise(31, 17).save(buffer, "AVIF")
    np.testing.assert_array_equal(decoded(buffer.getvalue() + APPENDED[appended]), decoded(buffer.getvalue()))
