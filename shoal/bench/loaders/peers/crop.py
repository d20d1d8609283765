"""What Python loaders do with a sample: the fastest of what is installed, with the filter that was asked for.

Decoding: simplejpeg, else Pillow. Bilinear: OpenCV, else Pillow's affine transform. Antialiased: Pillow.
"""

import importlib
import importlib.util
import io
import math
import random
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.bench.loaders.peers.task import Task


@cache
def library(name: str) -> Any:
    """Return a module, or None if this Python does not have it."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def how(task: Task) -> str:
    """Return in words what `make` uses."""
    if task.kind != "images":
        return ""
    decoder = "simplejpeg" if library("simplejpeg") else "Pillow"
    return f"{decoder}, {'OpenCV' if library('cv2') and not task.antialias else 'Pillow'} {task.filter}"


def make(value: Any, task: Task) -> NDArray[Any]:
    """Return a sample as an array: a random-resized crop, a window as int64, a row."""
    if task.kind == "images":
        return random_crop(decode(value), task)
    if task.kind == "tokens":
        return np.asarray(value).astype(np.int64)
    return np.asarray(value)


def decode(data: Any) -> NDArray[Any]:
    """Return the pixels of an encoded image, [height, width, 3]."""
    data = data if isinstance(data, bytes) else bytes(data)
    simplejpeg = library("simplejpeg")
    if data[:2] == b"\xff\xd8" and simplejpeg is not None:
        pixels: NDArray[Any] = simplejpeg.decode_jpeg(data)
        return pixels
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def random_crop(pixels: NDArray[Any], task: Task) -> NDArray[Any]:
    """Return a random part of the image at the size asked for; half are flipped."""
    x, y, width, height = random_box(pixels.shape[1], pixels.shape[0])
    crop = resize(pixels[y : y + height, x : x + width], task)
    return np.ascontiguousarray(crop[:, ::-1]) if random.random() < 0.5 else crop  # noqa: S311


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Return x, y, width and height of 8% to 100% of the area, 3:4 to 4:3."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)  # noqa: S311
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))  # noqa: S311
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h  # noqa: S311
    return 0, 0, width, height


def resize(crop: NDArray[Any], task: Task) -> NDArray[Any]:
    """Return the crop at the size asked for."""
    cv2 = library("cv2")
    if cv2 is not None and not task.antialias:
        cv2.setNumThreads(1)  # loaders run several at a time
        resized: NDArray[Any] = cv2.resize(crop, (task.size, task.size), interpolation=cv2.INTER_LINEAR)
        return resized
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(crop))
    if task.antialias:
        return np.asarray(image.resize((task.size, task.size), Image.Resampling.BILINEAR))
    across, down = crop.shape[1] / task.size, crop.shape[0] / task.size
    matrix = (across, 0.0, 0.0, 0.0, down, 0.0)
    return np.asarray(
        image.transform((task.size, task.size), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    )
