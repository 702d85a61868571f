"""From a picture file to pixels: the one way in which this project decodes, scales and crops.

`load_image` is used wherever a picture comes from a file, so that training, inspection and evaluation see the same
pixels; `to_tensor` is what the network gets.
"""

import io
import os
import re
import stat
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageColor, UnidentifiedImageError, features
from torch import Tensor

from unet_attn.faults import DataError, shown

# Formats by content, whatever the file is called. EPS and PDF would start programs, TGA accepts nearly any bytes.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000") + (
    ("AVIF",) if features.check("avif") else ()
)
SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")  # of the common ones
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1")  # phones' pictures, often named .jpg
# EXIF orientation (tag 0x0112) -> what makes the picture upright; 1 and anything unknown is upright already.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
READING = 4  # raised when some file comes out otherwise than before, so that caches forget what they know of it
UNWRITTEN = 64  # so many zeros at the end of a WebP or AVIF file are looked at more closely: whole ones have a few
# A JPEG marker that begins a segment or ends the file. Other bytes behind 0xff: an escape, a restart, a fill byte, a
# marker without a segment (ITU-T T.81, section B.1.1).
JPEG_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])", re.DOTALL)
TIFF_BITS, TIFF_PHOTOMETRIC = 258, 262  # tags: bits per pixel; 0 where the pixel 0 is white (TIFF 6.0, section 8)
MAX_ASPECT = 16  # of a longer strip, random crops come from the middle: bounds the memory of a 1 x 1,000,000 picture

Crop = Literal["center", "random"]


# Kinds of faults of pictures. UNREADABLE is the file system's fault and may pass; the others stay with the file.
EMPTY, NO_PICTURE, DAMAGED = "empty file", "not a picture", "damaged picture"
TOO_LARGE, UNSUPPORTED, UNREADABLE = "too many pixels", "unsupported pixels", "unreadable file"


class ImageError(DataError):
    """A picture that cannot be decoded; `reason` is the message without the file's name, `kind` one of a few words."""

    def __init__(self, name: str, reason: str, kind: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.reason = reason
        self.kind = kind

    def __reduce__(self) -> tuple:  # so that loader processes can send it
        return type(self), (str(self).removesuffix(f": {self.reason}"), self.reason, self.kind)


# ---- decoding


def load_image(
    source: str | Path | BinaryIO, *, channels: int = 3, background: str = "white", max_pixels: int | None = None
) -> Image.Image:
    """Decode a picture: upright, without transparency, 8 bit, grey or colour.

    channels: 1 gives mode "L", 3 gives "RGB". EXIF orientation is applied; transparent pixels show `background` (any
    CSS colour); 16-bit grey is scaled from 0..65535 to 0..255; of an animation the first frame is taken. A picture of
    more than `max_pixels` (None: Pillow's limit against decompression bombs) is refused.
    Raises ImageError, which names the file, if there is no complete picture of that kind in it.
    """
    name = shown(Path(source)) if isinstance(source, (str, Path)) else getattr(source, "name", "picture")
    colour = background_colour(background)
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 (grey) or 3 (colour), got {channels}")
    try:
        if not isinstance(source, (str, Path)):
            return _decode(source, channels, colour, max_pixels)
        if not stat.S_ISREG(os.stat(source).st_mode):  # opening a pipe would wait for ever
            raise _Unusable("is not a regular file", UNREADABLE)
        with open(source, "rb") as file:
            return _decode(file, channels, colour, max_pixels)
    except Exception as error:  # decoders raise nearly everything on damaged files
        raise ImageError(str(name), *_reason(error)) from error


class _Unusable(Exception):
    """Says in plain words why a file is no picture for us, and what kind of fault that is."""


def background_colour(background: str) -> tuple[int, int, int]:
    """(red, green, blue) of a CSS colour: a name, #rrggbb, rgb(...), hsl(...). Raises ValueError naming what came."""
    try:
        return ImageColor.getrgb(background)[:3]
    except ValueError:
        raise ValueError(f'background must be a colour such as "white" or "#80a0ff", got {background!r}') from None


def _decode(file: BinaryIO, channels: int, colour: tuple[int, int, int], max_pixels: int | None) -> Image.Image:
    file.seek(0)
    head = file.read(32)
    file.seek(0)
    if not head:
        raise _Unusable("the file is empty", EMPTY)
    with _pixel_limit(max_pixels) as limit:
        try:
            image = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError:
            raise _unknown(head) from None
        if image.width * image.height > limit:
            raise _Unusable(f"has {image.width} x {image.height} pixels, more than max_pixels {limit}", TOO_LARGE)
        image.load()  # raises on a truncated file: LOAD_TRUNCATED_IMAGES, which trains on grey smear, is never set here
        _check_end(file, image)
    if image.format == "PNG":
        _scale_transparent_colour(image, depth=head[24])
    image = _flatten(image, colour)
    return image.convert("L" if channels == 1 else "RGB")


def _unknown(head: bytes) -> _Unusable:
    """What to say of a file that no decoder took, by its first bytes."""
    brands = head[8:] if head[4:8] == b"ftyp" else b""  # ISO/IEC 14496-12: the family of AVIF, HEIC and videos
    if head.startswith(SIGNATURES) or b"avif" in brands or b"avis" in brands:
        return _Unusable("is damaged at its beginning", DAMAGED)
    if any(brand in brands for brand in HEIC_BRANDS):
        return _Unusable("is a HEIC picture, which is not read: convert it to JPEG or PNG", UNSUPPORTED)
    return _Unusable(f"is not a picture (it begins with {head[:16]!r})", NO_PICTURE)


def _check_end(file: BinaryIO, image: Image.Image) -> None:
    """Refuse a picture whose end was never written: some decoders take the zeros that stand there for grey or garbage.

    Zeros behind a whole picture are harmless, in a phone's video or another program's data too.
    """
    if image.format == "PNG":
        file.seek(0)
        _check_png(file.read())
    if image.format not in WHOLE:
        return
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - (1 if image.format in ("JPEG", "MPO") else UNWRITTEN)))
    if any(file.read()):
        return
    file.seek(0)
    if not WHOLE[image.format](file.read(), image):
        raise _Unusable("is damaged: its end is zeros", DAMAGED)


def _check_png(data: bytes) -> None:
    """Refuse pixels that are not those of their checksums, and a missing end; Pillow asks for neither.

    Chunks: length, kind, data, CRC-32 of kind and data (PNG, section 5.3). What follows the end does not count.
    """
    at, view = 8, memoryview(data)  # behind the signature
    while (kind := data[at + 4 : at + 8]) != b"IEND":
        if not kind.isalpha():
            raise _Unusable("is damaged: its end is missing", DAMAGED)
        end = at + 8 + int.from_bytes(view[at : at + 4], "big")
        if kind == b"IDAT" and zlib.crc32(view[at + 4 : end]) != int.from_bytes(view[end : end + 4], "big"):
            raise _Unusable("is damaged: its pixels do not fit their checksum", DAMAGED)
        at = end + 4


def _whole_jpeg(data: bytes, image: Image.Image) -> bool:
    """Whether the marker of the end stands behind the scans. Of several frames the first counts, which is what is read.

    From one marker to the next over the segments, as thumbnails in them have ends of their own; behind the head of a
    scan, which is a segment too, its data are searched.
    """
    at = 0
    while marker := JPEG_MARKER.search(data, at):
        if marker[1] == b"\xd9":
            return True
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")  # the segment's length
    return False


def _whole_webp(data: bytes, image: Image.Image) -> bool:
    """Whether the decoder needs the zeros at the end of the first frame, as it does where a flat picture is whole.

    An encoder writes no more than is needed. What stands in place of bytes that were never written is more than that,
    as a decoder takes zeros for whatever is shortest: then the frame decodes without some of them too.
    """
    at = 12  # behind "RIFF", the size and "WEBP"
    while at < len(data):
        kind, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if kind in (b"VP8 ", b"VP8L"):
            frame = data[at + 8 : at + 8 + length]
            break
        at += 8 + (16 if kind == b"ANMF" else length + length % 2)  # the frames of an animation lie within ANMF
    else:
        return False
    if len(frame) < UNWRITTEN or any(frame[-UNWRITTEN:]):
        return True
    frame = frame[: -(UNWRITTEN // 2)]
    frame += bytes(len(frame) % 2)
    chunk = b"WEBP" + kind + len(frame).to_bytes(4, "little") + frame
    try:
        Image.open(io.BytesIO(b"RIFF" + len(chunk).to_bytes(4, "little") + chunk), formats=["WEBP"]).load()
    except (OSError, EOFError):
        return True
    return False


AVIF_BOXES = (b"ftyp", b"meta", b"moov", b"mdat")  # those that a picture or an animation is made of


def _whole_avif(data: bytes, image: Image.Image) -> bool:
    """Whether the last box of the picture's own has been written, up to zeros that metadata may end in.

    Boxes: ISO/IEC 14496-12, section 4.2. Others, and what is none, may be anything that was appended.
    """
    at = end = 0
    while at + 8 <= len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if kind == b"ftyp" and at:  # another file begins, such as a phone's video
            break
        at += max(size, 8) if size else len(data)  # 0: up to the end of the file
        end = at if kind in AVIF_BOXES else end
    written = data[:end].rstrip(b"\0")
    metadata = [image.info[key].rstrip(b"\0") for key in ("exif", "xmp") if key in image.info]
    return min(end, len(data)) - len(written) < UNWRITTEN or any(text and written.endswith(text) for text in metadata)


WHOLE = {"JPEG": _whole_jpeg, "MPO": _whole_jpeg, "WEBP": _whole_webp, "AVIF": _whole_avif}


def _scale_transparent_colour(image: Image.Image, *, depth: int) -> None:
    """Give the transparent colour of a PNG, which Pillow leaves in the file's bits per channel, the pixels' 8 bits."""
    colour = image.info.get("transparency")
    if image.mode == "L" and depth in (2, 4) and isinstance(colour, int):
        most = 2**depth - 1
        image.info["transparency"] = (colour & most) * 255 // most  # higher bits are to be ignored (PNG, tRNS)
    elif image.mode == "RGB" and depth == 16 and isinstance(colour, tuple):
        # as Pillow does with the pixels: the colours that differ from it only in the lower bytes are lost with it
        image.info["transparency"] = tuple(value >> 8 for value in colour)


_limit_lock = threading.Lock()


@contextmanager
def _pixel_limit(max_pixels: int | None) -> Iterator[float]:
    """The number of pixels to accept. Pillow's own guard stays on, raised for the moment if the user asks for more."""
    with _limit_lock:  # another thread may have raised it for a moment
        standard = Image.MAX_IMAGE_PIXELS
    if standard is None or max_pixels is None or max_pixels <= standard:
        yield min(limit for limit in (standard, max_pixels, float("inf")) if limit is not None)
        return
    with _limit_lock:  # the guard is a global of Pillow
        Image.MAX_IMAGE_PIXELS = max_pixels
        try:
            yield max_pixels
        finally:
            Image.MAX_IMAGE_PIXELS = standard


def _flatten(image: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    """Upright, 8 bit per channel, transparency composited on `colour`; the mode is any that converts to L and RGB."""
    orientation = _orientation(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        image = _from_16_bit(image)
    elif image.mode in ("I", "F"):
        number = "integer" if image.mode == "I" else "float"
        if (bits := _bits(image, 32)) < 32:
            number = f"signed {number}"
        raise _Unusable(f"has {bits}-bit {number} pixels, whose range no one knows", UNSUPPORTED)
    if image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, (*colour, 255))
        canvas.alpha_composite(image.convert("RGBA"))
        image = canvas.convert("RGB")
    return image.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else image


def _orientation(image: Image.Image) -> object:
    """The EXIF orientation after loading (formats that turn the pixels themselves have removed it by then)."""
    try:
        return image.getexif().get(0x0112)
    except Exception:  # damaged EXIF data: the pixels are good, take them as they lie
        return None


def _bits(image: Image.Image, usual: int) -> int:
    """Bits per pixel of a grey TIFF, which Pillow leaves as they are; the usual number in other formats."""
    return getattr(image, "tag_v2", {}).get(TIFF_BITS, (usual,))[0]


def _from_16_bit(image: Image.Image) -> Image.Image:
    """0..65535, or of a TIFF of 12 bits 0..4095, to 0..255, rounded; Pillow's own conversion would clip at 255."""
    most = 2 ** _bits(image, 16) - 1
    pixels = np.clip(np.asarray(image).astype(np.int64), 0, most)
    if getattr(image, "tag_v2", {}).get(TIFF_PHOTOMETRIC) == 0:
        pixels = most - pixels
    grey = Image.fromarray(((pixels * 255 + most // 2) // most).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):  # PNG: one grey value stands for "nothing here"
        grey.putalpha(Image.fromarray(np.where(pixels == transparent, 0, 255).astype(np.uint8)))
    return grey


def _reason(error: Exception) -> tuple[str, str]:
    """What to say of an error, and the kind of fault."""
    if isinstance(error, _Unusable):
        return error.args
    if isinstance(error, Image.DecompressionBombError):
        return "has too many pixels (a decompression bomb?); max_pixels sets the limit", TOO_LARGE
    if isinstance(error, OSError) and error.strerror:
        return error.strerror, UNREADABLE
    text = str(error) or type(error).__name__
    if not isinstance(error, OSError | SyntaxError):  # the two that Pillow means damaged files by
        text = f"cannot be decoded ({type(error).__name__}: {text})"
    return text, DAMAGED


# ---- from a decoded picture to what the network sees


def to_tensor(image: Image.Image | np.ndarray) -> Tensor:
    """A picture, or its uint8 pixels (H, W) or (H, W, C), as float32 (C, H, W): black exactly -1, white exactly +1.

    Raises ValueError for a picture that is neither grey (mode L) nor RGB, and for pixels of another kind.
    """
    if isinstance(image, Image.Image) and image.mode not in ("L", "RGB"):
        raise ValueError(f"expected a picture of mode L or RGB, as load_image gives, got mode {image.mode}")
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        raise ValueError(f"expected uint8 pixels (H, W) or (H, W, C), got {pixels.dtype} {pixels.shape}")
    return scaled(channels_first(pixels))


def channels_first(pixels: np.ndarray) -> np.ndarray:
    return pixels[None] if pixels.ndim == 2 else rearrange(pixels, "h w c -> c h w")


def scaled(pixels: np.ndarray) -> Tensor:
    """uint8 (C, H, W) to float32 in [-1, 1]: 0 / 127.5 - 1 = -1 and 255 / 127.5 - 1 = 1, both exact."""
    return torch.tensor(pixels, dtype=torch.float32).div_(127.5).sub_(1.0)


def resize_and_crop(
    image: Image.Image, resolution: int, crop: Crop = "center", generator: torch.Generator | None = None
) -> Image.Image:
    """Scale the shorter side to `resolution` with antialiasing, then cut resolution x resolution out of the longer one.

    crop: "center" or "random"; random places come from `generator`, and are the centre if there is none.
    """
    strip = fit(image, (resolution, resolution), crop)
    left, top = corner(strip.size, (resolution, resolution), generator)
    return strip.crop((left, top, left + resolution, top + resolution))


def fitted_size(image_size: tuple[int, int], size: tuple[int, int], crop: Crop) -> tuple[int, int]:
    """(width, height) of a picture scaled so that it just covers `size`, and cut to it unless crops are random."""
    return _fitted(image_size, size, crop)[1]


def _fitted(
    image_size: tuple[int, int], size: tuple[int, int], crop: Crop
) -> tuple[tuple[float, float], tuple[int, int]]:
    """Width and height of the part of a picture that is kept, and what it is scaled to."""
    # the side that limits the scale, as the fraction target / own: integers, so that nothing is lost by rounding
    target, own = max(zip(size, image_size, strict=True), key=lambda pair: pair[0] / pair[1])
    room = 1 if crop == "center" else MAX_ASPECT
    kept = tuple(min(side, room * wanted * own / target) for side, wanted in zip(image_size, size, strict=True))
    return kept, tuple(max(wanted, round(part * target / own)) for part, wanted in zip(kept, size, strict=True))


def fit(image: Image.Image, size: tuple[int, int], crop: Crop) -> Image.Image:
    """Scale a picture so that it just covers `size`; what is too much is cut off evenly unless crops are random.

    Bicubic with antialiasing, as Parmar et al. 2022 (On Aliased Resizing) ask of pictures that are compared by a score.
    """
    (width, height), fitted = _fitted(image.size, size, crop)
    if image.size == fitted:
        return image
    left, top = (image.width - width) / 2, (image.height - height) / 2
    return image.resize(fitted, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))


def corner(fitted: tuple[int, int], size: tuple[int, int], generator: torch.Generator | None) -> tuple[int, int]:
    """Left and top of the part of this size to cut out of a fitted picture: the middle, or a random place."""
    room = [have - wanted for have, wanted in zip(fitted, size, strict=True)]
    if generator is None or not any(room):
        return room[0] // 2, room[1] // 2
    draws = torch.rand(2, generator=generator).tolist()
    return int(draws[0] * (room[0] + 1)), int(draws[1] * (room[1] + 1))
