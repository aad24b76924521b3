"""Decodes the fields of examples: whole images in RGB, masks with the values that they store."""

from __future__ import annotations

import contextlib
import functools
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from hvd_elastic.errors import DataError
from hvd_elastic.json_text import parse_json

try:
    from PIL import Image, UnidentifiedImageError
except ModuleNotFoundError:  # pragma: no cover  # reading tokens needs no Pillow
    Image = None  # type: ignore[assignment]

Decoder = Callable[[bytes], Any]

PIXELS = 2
"""Raised when a decoder gives other pixels of the same bytes; a part of the order of a dataset."""
_JPEG = b"\xff\xd8"  # the first bytes of such a file
_APP1, _SCAN, _END = 0xE1, 0xDA, 0xD9  # markers of a JPEG
_EXIF, _XMP = b"Exif\0\0", b"tiff:Orientation"
_ORIENTATION, _SHORT, _ENTRY_BYTES = 0x0112, 3, 12  # of EXIF
_TRANSPOSES = (
    *("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE"),
    *("ROTATE_270", "TRANSVERSE", "ROTATE_90"),
)
"""What brings an image upright, for the orientations from 2 on."""
SIDEWAYS = (5, 6, 7, 8)
"""Orientations in which width and height are exchanged."""
_BITS_PER_SAMPLE = 258  # of TIFF
_LOSSY = {"jpg", "jpeg", "jpe", "jfif"}
_LOSSLESS = {"png", "tif", "tiff", "bmp", "gif"}
_PICTURES = _LOSSY | _LOSSLESS | {"webp", "avif", "jp2", "ppm", "pgm"}
_MASKS = re.compile(
    "mask|seg|segm|segmentation|sem|semantic|inst|instance|panoptic|label|labels|labelmap|"
    "annotation|depth|disparity|ids|index|trimap|gt"
)


# -- whole images ----------------------------------------------------------------------------------


def decode(data: bytes) -> Any:
    """Return an image in RGB, upright (``PIL.Image.Image``); see :func:`to_rgb`.

    Raises:
        DataError: it is damaged, too large or no image; says how.
    """
    with explained(data):
        picture = open_picture(data)
        return turned(to_rgb(picture), orientation(picture))


def decode_mask(data: bytes) -> np.ndarray:
    """Return the values that an image stores, such as the classes of a segmentation mask.

    Palette indices, 16 bits and 32 bits stay as they are: nothing is scaled or looked up.

    Returns:
        Array of height x width, or height x width x channels where there are several.

    Raises:
        DataError: it is damaged, too large or no image; says how.
    """
    with explained(data):
        picture = open_picture(data)
        values = np.array(turned(picture, orientation(picture)))
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def open_picture(data: bytes) -> Any:
    """Return an image whose pixels are not decoded yet (``PIL.Image.Image``)."""
    if Image is None:
        raise DataError("images need Pillow: pip install pillow")
    return Image.open(BytesIO(data))


@contextlib.contextmanager
def explained(data: bytes) -> Iterator[None]:
    """Raise a DataError that says what is wrong with an image for whatever its decoder raises."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # Pillow raises whatever a damaged file leads to
        if not data:
            raise DataError("it is empty (0 bytes)") from None
        if isinstance(error, UnidentifiedImageError):
            raise DataError("no picture that Pillow knows") from None
        raise DataError(str(error) or type(error).__name__) from error


def jpeg_orientation(data: bytes) -> int:
    """Return how EXIF or XMP says that the pixels of a JPEG lie, 1 (upright) to 8.

    It is what :func:`orientation` finds, in a tenth of the time.
    """
    at = len(_JPEG)
    while data[at : at + 1] == b"\xff":
        marker = data[at + 1]
        if marker in (_SCAN, _END):
            break
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == _APP1:
            segment = data[at + 4 : end]
            if segment.startswith(_EXIF):
                found = _exif_orientation(segment[len(_EXIF) :])
                if found is not None:
                    return found
            if _XMP in segment or segment.startswith(_EXIF):
                return orientation(open_picture(data))
        at = max(end, at + 2)
    return 1


def _exif_orientation(tiff: bytes) -> int | None:
    """Return the orientation in EXIF; None: there is none, or another parser has to find it."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return None
    try:
        (at,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, at)
        for place in range(at + 2, at + 2 + _ENTRY_BYTES * count, _ENTRY_BYTES):
            tag, kind, number, value = struct.unpack_from(f"{order}HHIH", tiff, place)
            if tag == _ORIENTATION and (kind, number) == (_SHORT, 1) and value in range(1, 9):
                return int(value)
    except struct.error:
        return None
    return None


def orientation(picture: Any) -> int:
    """Return how EXIF or XMP says that the pixels of an image lie, 1 (upright) to 8."""
    if picture.format not in ("JPEG", "MPO"):  # these may still be decoded at a part of their size
        picture.load()  # finds damage, and turns a TIFF
    try:
        found = picture.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  Pillow raises whatever damaged EXIF leads to
        return 1
    return found if found in range(1, 9) else 1


def turned(picture: Any, lies: int) -> Any:
    """Return an image upright that lies as :func:`orientation` says."""
    if lies == 1:
        return picture
    return picture.transpose(getattr(Image.Transpose, _TRANSPOSES[lies - 2]))


def to_rgb(picture: Any) -> Any:
    """Return an image in RGB: 16 bits scaled to 8, transparent parts on white.

    Raises:
        DataError: its numbers have no known range.
    """
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PPM"):
        return _narrowed(picture).convert("RGB")
    if picture.mode in ("I", "F"):
        raise DataError(f"pixels of 32 bits (mode {picture.mode}) have no known range")
    if "A" in picture.getbands() or "transparency" in picture.info:
        whole = picture.convert("RGBA")
        ground = Image.new("RGBA", whole.size, "white")
        return Image.alpha_composite(ground, whole).convert("RGB")
    return picture.convert("RGB")


def _narrowed(picture: Any) -> Any:
    """Return an image of 16 bits, or of 12 in TIFF, with 8 bits."""
    values = np.asarray(picture).astype(np.uint32)
    bits = getattr(picture, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[0]
    most = (1 << bits) - 1
    grey = ((values * 255 + most // 2) // most).astype(np.uint8)
    clear = picture.info.get("transparency")
    if isinstance(clear, int):
        grey[values == clear] = 255
    return Image.fromarray(grey)


# -- fields ----------------------------------------------------------------------------------------


def _array(data: bytes) -> np.ndarray:
    return np.load(BytesIO(data), allow_pickle=False)


def _arrays(data: bytes) -> dict[str, np.ndarray]:
    with np.load(BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def _as_stored(value: Any) -> Any:
    return value


DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(_PICTURES, decode),
    "npy": _array,
    "npz": _arrays,
    "cls": int,
    "txt": bytes.decode,
    "json": parse_json,
}
"""How the fields with these endings are decoded; others stay bytes. See :func:`decoders_of`."""
_PICKLES = {"pth", "pt", "pkl", "pickle", "pyd"}
"""Endings of pickles, which can run any code when they are loaded."""


def decoders_of(
    fields: Sequence[str],
    given: Decoder | Mapping[str, Decoder] | None,
    kinds: Mapping[str, str] | None = None,
) -> list[Decoder]:
    """Return the decoder of each field.

    An image is a mask if its name says so (``mask.png``, ``inst.png``, ``depth.tif``), or if it is
    stored without loss beside a JPEG.

    Args:
        fields: their names, such as ``("jpg", "mask.png")``.
        given: decoder of the first field, or decoders by field, in place of the usual ones.
        kinds: kinds of values that are no bytes, by field, which stay as they are.

    Raises:
        DataError: a decoder is given for a field that is not among them, or none for pickles.
    """
    if given is None:
        given = {}
    elif not isinstance(given, Mapping):
        given = dict.fromkeys(fields[:1], given)
    if unknown := sorted(set(given) - set(fields)):
        raise DataError(
            f"decode names {', '.join(map(repr, unknown))}, and the fields are {', '.join(fields)}"
        )
    for field in fields:
        if _ending(field) in _PICKLES and field not in given:
            raise DataError(
                f"the field {field} holds pickles, which can run any code when they are loaded, so "
                "they are not; leave it out by fields=, or decode it yourself, such as "
                f"decode={{{field!r}: bytes}}"
            )
    lossy = any(_ending(field) in _LOSSY for field in fields)
    return [
        given.get(field)
        or (_as_stored if field in (kinds or {}) else _usual(field, beside_jpeg=lossy))
        for field in fields
    ]


def _usual(field: str, *, beside_jpeg: bool) -> Decoder:
    words = re.split("[^a-z]+", field.lower())
    is_mask = any(map(_MASKS.fullmatch, words[:-1])) or beside_jpeg
    if _ending(field) in _LOSSLESS and is_mask:
        return decode_mask
    return DECODERS.get(_ending(field), bytes)


def _ending(field: str) -> str:
    return field.lower().rpartition(".")[2]


def order_key(fields: Sequence[str], decoders: Sequence[Decoder]) -> str | None:
    """Return how images and what the script decodes are decoded; None: there is none of it."""
    key = tuple(
        (field, _described(decoder))
        for field, decoder in zip(fields, decoders, strict=True)
        if decoder in (decode, decode_mask)
        or decoder not in (_as_stored, DECODERS.get(_ending(field), bytes))
    )
    return repr((PIXELS, key)) if key else None


def _described(decoder: Any) -> str:
    """Return the name of a decoder, with its settings where they are plain."""
    if isinstance(decoder, functools.partial):
        values: dict[Any, Any] = {**dict(enumerate(decoder.args)), **decoder.keywords}
        return f"{_described(decoder.func)}({_plain(values)})"
    name = getattr(decoder, "__qualname__", None)
    if name is not None:
        return str(name)
    return f"{type(decoder).__qualname__}({_plain(getattr(decoder, '__dict__', {}))})"


def _plain(values: Mapping[Any, Any]) -> str:
    kinds = (bool, int, float, str, bytes, tuple, type(None))
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if type(value) in kinds)
