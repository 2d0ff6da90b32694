"""Pictures to bytes: the image formats, each with the recipe of the picture inside the file.

The bytes are part of the contract: the same pixels and settings give the same file, so every setting of an encoder
stands here and none is left to its default.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, PngImagePlugin

KEYWORD = "lightmill"  # of the PNG text chunk; JPEG and WebP hold the text as EXIF
DEFAULT_QUALITY = 95
# Of zlib-ng, which Pillow has: 6 takes twice the time, for photographs that are at most 1.5 % smaller.
_PNG_LEVEL = 4
_WEBP_METHOD = 4
_IMAGE_DESCRIPTION = 0x010E


@dataclass(frozen=True)
class ImageFormat:
    """A kind of image file.

    Attributes:
      suffix: of file names, with the dot.
      encode: takes an RGB image (height, width, 3), the text for the file and the quality from 1 to 100, None if
        there is none.
      lossy: whether there is a quality.
      max_text: longest text that fits into the file, in characters.
    """

    suffix: str
    encode: Callable[[np.ndarray, str, int | None], bytes]
    lossy: bool
    max_text: int | None = None


def _png(image: np.ndarray, text: str, quality: int | None) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text(KEYWORD, text)
    return _saved(image, "PNG", pnginfo=info, compress_level=_PNG_LEVEL)


def _jpeg(image: np.ndarray, text: str, quality: int | None) -> bytes:
    # No subsampling: half the resolution in colour is what a training set of coloured edges would learn.
    return _saved(image, "JPEG", exif=_exif(text), quality=quality, subsampling=0, optimize=False, progressive=False)


def _webp(image: np.ndarray, text: str, quality: int | None) -> bytes:
    return _saved(image, "WEBP", exif=_exif(text), quality=quality, method=_WEBP_METHOD, lossless=False, exact=False)


def _exif(text: str) -> Image.Exif:
    exif = Image.Exif()
    exif[_IMAGE_DESCRIPTION] = text
    return exif


def _saved(image: np.ndarray, kind: str, **settings) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind, **settings)
    return file.getvalue()


IMAGE_FORMATS: dict[str, ImageFormat] = {
    "png": ImageFormat(".png", _png, lossy=False),
    # A JPEG segment holds 65,533 bytes, of which EXIF's own structure takes some.
    "jpeg": ImageFormat(".jpg", _jpeg, lossy=True, max_text=65_000),
    "webp": ImageFormat(".webp", _webp, lossy=True),
}


def text_of(data: bytes) -> str:
    """The recipe inside an image file, "" if there is none."""
    with Image.open(io.BytesIO(data)) as image:
        text = image.info.get(KEYWORD) or image.getexif().get(_IMAGE_DESCRIPTION)
    return text if isinstance(text, str) else ""


def thumbnail(data: bytes, side: int) -> bytes:
    """A small WebP of an image file, at most `side` pixels wide and high, for a page that shows many.

    Raises:
      OSError: if it is no image.
    """
    with Image.open(io.BytesIO(data)) as image:
        image.thumbnail((side, side))
        return _saved(np.asarray(image.convert("RGB")), "WEBP", quality=75, method=_WEBP_METHOD)
