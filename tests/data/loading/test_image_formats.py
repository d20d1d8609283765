"""Every image format from files through `shoal pack` and the loader, beside Pillow's pixels.

Decoding gives Pillow's pixels bit for bit, whole or in part. The loader resizes the luma and chroma of JPEGs, each
from its own resolution, and converts to RGB afterwards: where nothing is resized it is within 1 level of Pillow's.
Everything else (grey, CMYK, PNG, WebP ...) is resized in RGB, to the same bits.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from shoal.cli.main import main
from shoal.data.loader import Loader
from shoal.data.loading.crops import ImageOptions, boxes_of
from shoal.data.pack.reader import Pack
from shoal.native import jpeg

Pixels = NDArray[np.uint8]
SIZE = 96


def picture(mode: str, *, width: int = SIZE, height: int = SIZE) -> Image.Image:
    """Return a picture with edges and slopes in all its channels."""
    small = np.random.default_rng(5).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    large = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    if mode in ("RGBA", "LA"):
        large.putalpha(Image.linear_gradient("L").resize((width, height)))
    return large.convert(mode)


def saved(mode: str, kind: str, *, width: int = SIZE, height: int = SIZE, **options: Any) -> bytes:
    file = io.BytesIO()
    picture(mode, width=width, height=height).save(file, kind, **options)
    return file.getvalue()


def turned() -> bytes:
    """Return a JPEG whose EXIF says that it is to be shown turned by a quarter."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved("RGB", "jpeg", quality=90, exif=exif)


FORMATS: dict[str, Callable[[], bytes]] = {
    "420.jpg": lambda: saved("RGB", "jpeg", quality=90, subsampling="4:2:0"),
    "422.jpg": lambda: saved("RGB", "jpeg", quality=90, subsampling="4:2:2"),
    "444.jpg": lambda: saved("RGB", "jpeg", quality=90, subsampling="4:4:4"),
    "cmyk.jpg": lambda: saved("CMYK", "jpeg", quality=90),
    "exif.jpg": turned,
    "grey.jpg": lambda: saved("L", "jpeg", quality=90),
    "grey.png": lambda: saved("L", "png"),
    "grey_alpha.png": lambda: saved("LA", "png"),
    "lossless.webp": lambda: saved("RGB", "webp", lossless=True),
    "lossy.webp": lambda: saved("RGB", "webp", quality=80),
    "optimised.jpg": lambda: saved("RGB", "jpeg", quality=70, optimize=True),
    "palette.png": lambda: saved("P", "png"),
    "progressive.jpg": lambda: saved("RGB", "jpeg", quality=90, progressive=True),
    "restarts.jpg": lambda: saved("RGB", "jpeg", quality=90, restart_marker_blocks=3),
    "rgb.bmp": lambda: saved("RGB", "bmp"),
    "rgb.gif": lambda: saved("RGB", "gif"),
    "rgb.png": lambda: saved("RGB", "png"),
    "rgb.ppm": lambda: saved("RGB", "ppm"),
    "rgb.tif": lambda: saved("RGB", "tiff"),
    "rgba.png": lambda: saved("RGBA", "png"),
}
NAMES = sorted(FORMATS)
CUT = ("420.jpg", "422.jpg", "444.jpg", "exif.jpg", "grey.jpg", "optimised.jpg", "restarts.jpg")
"""What is cut into segments; the rest is decoded whole."""
TO_CONVERT = ("420.jpg", "422.jpg", "444.jpg", "exif.jpg", "optimised.jpg", "progressive.jpg", "restarts.jpg")
"""What is luma and chroma until it is resized."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, make in FORMATS.items():
        (folder / name).write_bytes(make())
    return folder


@pytest.fixture(scope="module")
def packed(files: Path) -> Path:
    return pack_files(files, "formats.pack", restart_blocks=2)


def pack_files(files: Path, name: str, *, restart_blocks: int) -> Path:
    path = files.with_name(name)
    flags = ["--option", "names=true", "--restart-blocks", str(restart_blocks), "--compression", "none"]
    assert main(["pack", str(files), str(path), *flags]) == 0
    return path


def pillow(file: Path) -> Pixels:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def stored(path: Path, name: str) -> tuple[bytes, bytes]:
    """Return an image as the pack has it, and the index of its segments."""
    opened, row = Pack(path), NAMES.index(name)
    assert opened[row]["name"] == name
    offsets = opened.offsets(0, "image.index")
    return opened[row]["image"], opened.values(0, "image.index")[offsets[row] : offsets[row + 1]].tobytes()


def loaded(path: Path, options: ImageOptions, **more: Any) -> dict[str, Pixels]:
    """Return the pixels [height, width, 3] of each image that a loader gives, by name."""
    loader = Loader(path, batch_size=7, image=options, copy=True, **more)
    return {
        name: image.permute(1, 2, 0).numpy()
        for batch in loader
        for name, image in zip(batch["name"], batch["image"], strict=True)
    }


@pytest.mark.parametrize("name", NAMES)
def test_what_is_packed_has_pillows_pixels_bit_for_bit(name: str, files: Path, packed: Path) -> None:
    image, index = stored(packed, name)
    np.testing.assert_array_equal(pillow_of(image), pillow(files / name), "the file that is stored")
    np.testing.assert_array_equal(jpeg.decode(image, index), pillow(files / name), "what shoal decodes of it")
    assert bool(index) == (name in CUT and jpeg.available())


def pillow_of(encoded: bytes) -> Pixels:
    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("name", NAMES)
def test_crops_are_crops_of_the_whole_bit_for_bit(name: str, files: Path, packed: Path) -> None:
    (image, index), whole = stored(packed, name), pillow(files / name)
    draw = np.random.default_rng(1)
    boxes = [(0, 0, 1, 1), (95, 95, 1, 1), (0, 0, 96, 96), (15, 15, 2, 2), (16, 0, 16, 96), (0, 31, 96, 2)]
    for x, y in draw.integers(0, 90, (30, 2)).tolist():
        boxes.append((x, y, int(draw.integers(1, 97 - x)), int(draw.integers(1, 97 - y))))
    for x, y, w, h in boxes:
        np.testing.assert_array_equal(jpeg.decode(image, index, (x, y, w, h)), whole[y : y + h, x : x + w])


@pytest.mark.parametrize("antialias", [False, True])
def test_the_loader_gives_whole_images_as_pillow_does(antialias: bool, files: Path, packed: Path) -> None:
    whole = ImageOptions(size=SIZE, scale=(1, 1), ratio=(1, 1), flip=0, antialias=antialias)
    found = loaded(packed, whole)
    assert sorted(found) == NAMES
    for name, pixels in found.items():
        difference = np.abs(pixels.astype(int) - pillow(files / name))
        assert difference.max() <= (1 if name in TO_CONVERT else 0), name


@pytest.mark.parametrize("antialias", [False, True])
def test_the_loaders_crops_are_crops_of_pillows_pixels_resized(antialias: bool, files: Path, packed: Path) -> None:
    options = ImageOptions(size=40, antialias=antialias)
    found = loaded(packed, options, seed=3)
    sizes = np.full((len(NAMES), 2), SIZE, np.int32)
    boxes, flips = boxes_of(options, sizes, np.arange(len(NAMES)), seed=3, epoch=0)
    for row, name in enumerate(NAMES):
        wanted = np.empty((40, 40, 3), np.uint8)
        box, flip = boxes[row], bool(flips[row])
        jpeg.crop_resize_pixels(pillow(files / name), box, flip, wanted, antialias=antialias, channels_last=True)
        difference = np.abs(found[name].astype(int) - wanted)
        # Pillow's chroma has the size of luma before it is resized: at edges of colours that is another mean.
        assert difference.mean() <= (2 if name in TO_CONVERT else 0), name


def test_segments_change_no_bit_of_any_format(files: Path, packed: Path) -> None:
    plain = pack_files(files, "plain.pack", restart_blocks=0)
    for antialias in (False, True):
        options = ImageOptions(size=32, antialias=antialias)
        whole, cut = loaded(plain, options), loaded(packed, options)
        for name in NAMES:
            assert torch.equal(torch.from_numpy(whole[name]), torch.from_numpy(cut[name])), name


def test_an_image_is_not_turned_by_its_exif(files: Path) -> None:
    with Image.open(files / "exif.jpg") as image:
        assert image.getexif()[0x0112] == 6
    np.testing.assert_array_equal(pillow(files / "exif.jpg"), jpeg.decode((files / "exif.jpg").read_bytes()))
