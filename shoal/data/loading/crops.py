"""Which box of each image becomes a sample.

Training: a random part of the image, of random shape, as torchvision's RandomResizedCrop draws it; half are flipped.

1. Draw an area (`scale` of the image's) and an aspect ratio, up to ten times, until the box fits into the image; if
   none does, take the middle of the image, as much of it as the ratios allow.
2. Draw where the box lies, and whether it is flipped. All draws are a pure function of (seed, epoch, sample).

Evaluation: resize the shorter side to `resize` and cut the middle out; that is one box of the image, too.

Example: 500 x 375 with resize=256, size=224: the image would become 341 x 256, the middle begins at (58, 16), so the
box is 328.4 x 328.1 pixels from (85.0, 23.4) on.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError
from shoal.data.loading.augment import sample_seeds, uniform
from shoal.data.order import Indices

_TRIES = 10
Boxes = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """How images become samples of one size."""

    size: int | tuple[int, int] = 224
    """Height and width, or both in one number."""
    train: bool = True
    """Whether a random part is taken, or the middle."""
    scale: tuple[float, float] = (0.08, 1.0)
    """What part of the image's area is taken in training."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """The width over the height of that part."""
    flip: float = 0.5
    """How many of the images are flipped left to right in training."""
    resize: int | None = None
    """In evaluation, the length to which the shorter side is resized before the middle is cut out; without it, 8/7 of
    the smaller of `size` (256 for 224)."""
    antialias: bool = True
    """Whether pixels that are made smaller are averaged, as Pillow and torchvision do it; without it, four neighbours
    are mixed, which is faster and rougher."""
    channels_last: bool = False
    """[samples, height, width, 3] instead of [samples, 3, height, width]."""

    def __post_init__(self) -> None:
        height, width = self.shape
        if min(height, width) < 1:
            raise ConfigError(f"ImageOptions(size={self.size!r}) must be at least 1.")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ConfigError(f"ImageOptions(scale={self.scale}) must be two fractions, the smaller first.")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ConfigError(f"ImageOptions(ratio={self.ratio}) must be two ratios, the smaller first.")
        if self.resize is not None and self.resize < max(height, width):
            raise ConfigError(f"ImageOptions(resize={self.resize}) is smaller than size={self.size}. Use more.")

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of a sample."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


def boxes_of(
    options: ImageOptions, sizes: NDArray[np.int32], samples: Indices, *, seed: int, epoch: int
) -> tuple[Boxes, NDArray[np.uint8]]:
    """Return the box (x, y, width, height) of each image, and whether it is flipped; `sizes` are width and height."""
    if not options.train:
        return middle_boxes(sizes, options), np.zeros(len(sizes), dtype=np.uint8)
    draws = uniform(sample_seeds(samples, seed=seed, epoch=epoch), 3 + 2 * _TRIES)
    boxes = random_boxes(sizes, draws[:, 1:], scale=options.scale, ratio=options.ratio)
    return boxes, (draws[:, 0] < options.flip).astype(np.uint8)


def random_boxes(
    sizes: NDArray[np.int32], draws: Boxes, *, scale: tuple[float, float], ratio: tuple[float, float]
) -> Boxes:
    """Return a random box of each image; `draws` are numbers in [0, 1): where, and area and ratio for each try."""
    width, height = sizes[:, :1].astype(np.float64), sizes[:, 1:].astype(np.float64)
    area = width * height * (scale[0] + draws[:, 2::2] * (scale[1] - scale[0]))
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = np.exp(low + draws[:, 3::2] * (high - low))
    across, down = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (across >= 1) & (across <= width) & (down >= 1) & (down <= height)
    first = np.argmax(fits, axis=1)[:, None]
    w, h = np.take_along_axis(across, first, 1), np.take_along_axis(down, first, 1)
    x = np.floor(draws[:, :1] * (width - w + 1))
    y = np.floor(draws[:, 1:2] * (height - h + 1))
    boxes = np.concatenate([x, y, w, h], axis=1)
    none = ~fits.any(axis=1)
    boxes[none] = _largest_middle(sizes[none], ratio)
    return boxes


def _largest_middle(sizes: NDArray[np.int32], ratio: tuple[float, float]) -> Boxes:
    """Return as much of the middle of each image as the ratios allow."""
    width, height = sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64)
    w = np.maximum(1, np.minimum(width, np.rint(height * ratio[1])))
    h = np.maximum(1, np.minimum(height, np.rint(width / ratio[0])))
    return np.stack([(width - w) // 2, (height - h) // 2, w, h], axis=1)


def middle_boxes(sizes: NDArray[np.int32], options: ImageOptions) -> Boxes:
    """Return the box that is left when the shorter side is resized and the middle is cut out."""
    size = np.array(options.shape[::-1], dtype=np.float64)  # width, height
    shorter = options.resize or round(min(options.shape) * 8 / 7)
    factor = shorter / sizes.min(axis=1, keepdims=True)
    factor = np.maximum(factor, size / sizes)  # a size that is not square may ask for more
    factor = factor.max(axis=1, keepdims=True)
    resized = np.maximum(np.floor(sizes * factor + 1e-9), size)
    first = np.rint((resized - size) / 2)
    pixels = sizes / resized  # of the image in one of the resized image
    return np.concatenate([first * pixels, np.minimum(size * pixels, sizes - first * pixels)], axis=1)
