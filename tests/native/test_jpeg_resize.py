"""Batches of crops: the same through segments and whole decodes, and near to torch's interpolate on RGB."""

import io
import warnings

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from shoal.core.errors import DataError
from shoal.native import jpeg, jpeg_fallback
from tests.native.jpegs import Pixels, column, encode, picture, reference

SAMPLINGS = ["4:2:0", "4:2:2", "4:4:4", "4:4:0", "grey"]
SIZES = [(90, 70), (300, 200), (33, 47), (450, 350), (9, 8)]


def _boxes(sizes: list[tuple[int, int]], seed: int = 0) -> NDArray[np.float64]:
    random, boxes = np.random.default_rng(seed), []
    for width, height in sizes:
        w, h = random.integers(1, width + 1), random.integers(1, height + 1)
        boxes.append((random.integers(0, width - w + 1), random.integers(0, height - h + 1), w, h))
    return np.array(boxes, np.float64)


def _torch(pixels: Pixels, box: NDArray[np.float64], flip: bool, size: tuple[int, int], antialias: bool) -> Pixels:
    x, y, w, h = box.astype(int).tolist()
    crop = torch.from_numpy(pixels[y : y + h, x : x + w].transpose(2, 0, 1).astype(np.float32))[None]
    out = torch.nn.functional.interpolate(crop, size, mode="bilinear", antialias=antialias, align_corners=False)
    found = out[0].round().clamp(0, 255).to(torch.uint8).numpy()
    return np.ascontiguousarray(found[..., ::-1]) if flip else found


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_segments_whole_decodes_and_plain_c_give_the_same_bits(sampling: str, antialias: bool) -> None:
    originals = [encode(picture(*size, seed=n), sampling) for n, size in enumerate(SIZES)] * 3
    cut = [jpeg.transcode(original, 2) for original in originals]
    boxes, flips = _boxes(SIZES * 3), np.arange(15) % 2
    rows, out = np.arange(15), np.zeros((5, 15, 3, 56, 61), np.uint8)
    segments = (*column([one[0] for one in cut]), *column([one[1] for one in cut]), None, rows, boxes, flips)
    assert jpeg.crop_resize_batch(*segments, out[0], antialias=antialias) == {}
    assert jpeg.crop_resize_batch(*segments, out[1], antialias=antialias, threads=3) == {}
    assert jpeg.crop_resize_batch(*segments, out[2], antialias=antialias, portable=True) == {}
    whole = (*column(originals), None, None, None, rows, boxes, flips)
    assert jpeg.crop_resize_batch(*whole, out[3], antialias=antialias, threads=2) == {}
    # Progressive files hold the same coefficients, and are read by libjpeg.
    pictures = [picture(*size, seed=n) for n, size in enumerate(SIZES)] * 3
    others = originals if sampling == "4:4:0" else [encode(one, sampling, progressive=True) for one in pictures]
    whole = (*column(others), None, None, None, rows, boxes, flips)
    assert jpeg.crop_resize_batch(*whole, out[4], antialias=antialias, threads=2) == {}
    for other in out[1:]:
        assert np.array_equal(out[0], other)
    last = np.zeros((15, 56, 61, 3), np.uint8)
    assert jpeg.crop_resize_batch(*segments, last, antialias=antialias, channels_last=True) == {}
    assert np.array_equal(last.transpose(0, 3, 1, 2), out[0])


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize(("sampling", "most"), [("4:4:4", 0.5), ("grey", 0.5), ("4:2:2", 1.5), ("4:2:0", 1.5)])
def test_resized_crops_are_near_to_those_of_rgb(sampling: str, most: float, antialias: bool) -> None:
    # Chroma is resized from its own resolution, RGB after it was upsampled: that is the difference, and rounding.
    smooth = Image.fromarray(picture(140, 110)).resize((450, 350), Image.Resampling.BICUBIC)
    original = encode(np.asarray(smooth), sampling)
    (cut, index), whole = jpeg.transcode(original), reference(original)
    boxes = np.array([[0, 0, 450, 350], [101, 53, 220, 199], [7, 9, 61, 200], [300, 200, 150, 150]], np.float64)
    out, flips = np.zeros((4, 3, 224, 224), np.uint8), np.array([0, 1, 0, 1])
    said = jpeg.crop_resize_batch(
        *column([cut]), *column([index]), None, np.zeros(4, np.int64), boxes, flips, out, antialias=antialias
    )
    assert said == {}
    for found, box, flip in zip(out, boxes, flips, strict=True):
        wanted = _torch(whole, box, bool(flip), (224, 224), antialias)
        assert np.abs(found.astype(int) - wanted).mean() < most


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("out_size", [(224, 224), (7, 300), (1, 1), (40, 3)])
def test_rgb_is_resized_as_torch_does_it_within_one_level(out_size: tuple[int, int], antialias: bool) -> None:
    pixels = picture(310, 150)
    for seed in range(6):
        box, flip = _boxes([(310, 150)], seed)[0], seed % 2 == 1
        out = np.zeros((3, 3, *out_size), np.uint8)
        jpeg.crop_resize_pixels(pixels, box, flip, out[0], antialias=antialias)
        jpeg.crop_resize_pixels(pixels, box, flip, out[1], antialias=antialias, portable=True)
        found = jpeg_fallback.resize(pixels, box, flip, out_size, antialias=antialias)
        assert np.array_equal(out[0], out[1])
        assert np.array_equal(out[0], found.transpose(2, 0, 1))
        assert np.abs(out[0].astype(int) - _torch(pixels, box, flip, out_size, antialias)).max() <= 1


def test_a_box_of_parts_of_pixels_lies_between_its_neighbours() -> None:
    pixels = np.repeat(np.arange(0, 200, 10, dtype=np.uint8)[None, :, None], 3, axis=2).repeat(4, axis=0)
    out = np.zeros((3, 4, 4), np.uint8)
    jpeg.crop_resize_pixels(pixels, np.array([2.5, 0.0, 4.0, 4.0]), False, out)
    assert out[0, 0].tolist() == [25, 35, 45, 55]


def test_pngs_and_progressive_files_stand_in_one_batch_with_segments() -> None:
    pixels, png = picture(80, 60), io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    cut, index = jpeg.transcode(encode(pixels, "4:4:4"))
    rows = [png.getvalue(), cut, encode(pixels, "4:4:4", progressive=True)]
    out = np.zeros((3, 3, 32, 32), np.uint8)
    boxes = np.tile(np.array([10.0, 5, 50, 40]), (3, 1))
    part, row = np.array([1, 1, 1], np.int32), np.arange(3)
    values, offsets = column(rows)
    indexes, index_offsets = column([b"", index, b""])
    said = jpeg.crop_resize_batch(
        [None, *values], [None, *offsets], [None, *indexes], [None, *index_offsets], part, row, boxes, None, out
    )
    assert said == {}
    assert np.array_equal(out[1], out[2])
    assert np.abs(out[0].astype(int) - out[1]).mean() < 12  # what the JPEG lost
    found, problems = jpeg.sizes(values, offsets, None, row)
    assert (found.tolist(), problems) == ([[80, 60]] * 3, {})


def test_what_fails_is_named_and_the_others_are_there() -> None:
    good, index = jpeg.transcode(encode(picture(80, 60)))
    images = [good, good[:300], good, b"no image", good]
    indexes = [index, index, index[:-1], b"", index]
    boxes = np.tile(np.array([0.0, 0, 80, 60]), (6, 1))
    boxes[4] = (60, 0, 21, 60)
    out = np.zeros((6, 3, 16, 16), np.uint8)
    row = np.array([0, 1, 2, 3, 4, 5])
    said = jpeg.crop_resize_batch(*column(images), *column(indexes), None, row, boxes, None, out, threads=2)
    assert sorted(said) == [1, 2, 3, 4, 5]
    assert "another image" in said[1] or "cut short" in said[1]
    assert "another image" in said[2]
    assert "Pillow cannot read" in said[3]
    assert "not inside" in said[4]
    assert "no such row" in said[5]
    assert out[0].any()
    assert jpeg.sizes(*column(images), None, row)[1].keys() == {3, 5}


def test_outputs_and_boxes_of_another_shape_are_refused() -> None:
    good, index = jpeg.transcode(encode(picture(80, 60)))
    columns, row = (*column([good]), *column([index])), np.zeros(1, np.int64)
    box = np.array([[0.0, 0, 8, 8]])
    with pytest.raises(DataError, match=r"do not go into .* Pass uint8 \[count, 3, H, W\]"):
        jpeg.crop_resize_batch(*columns, None, row, box, None, np.zeros((1, 16, 16, 3), np.uint8))
    with pytest.raises(DataError, match="contiguous"):
        jpeg.crop_resize_batch(*columns, None, row, box, None, np.zeros((1, 3, 16, 32), np.uint8)[..., ::2])
    with pytest.raises(DataError, match="as many boxes"):
        jpeg.crop_resize_batch(*columns, None, row, np.zeros((2, 4)), None, np.zeros((1, 3, 16, 16), np.uint8))
    for wrong in ([np.nan, 0, 8, 8], [0, 0, 8, np.inf], [-0.1, 0, 8, 8], [0, 0, 0, 8], [73, 0, 8, 8]):
        out = np.zeros((1, 3, 16, 16), np.uint8)
        assert list(jpeg.crop_resize_batch(*columns, None, row, np.array([wrong]), None, out)) == [0]


def test_without_the_library_pillow_and_numpy_come_near(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, index = jpeg.transcode(encode(picture(80, 60), "4:4:4"))
    columns, row = (*column([cut]), *column([index])), np.zeros(1, np.int64)
    box, flips, out = np.array([[3.0, 4, 60, 50]]), np.array([1]), np.zeros((2, 1, 3, 30, 20), np.uint8)
    assert jpeg.crop_resize_batch(*columns, None, row, box, flips, out[0]) == {}
    monkeypatch.setattr(jpeg, "library", lambda: None)
    assert jpeg.crop_resize_batch(*columns, None, row, box, flips, out[1]) == {}
    assert np.abs(out[0].astype(int) - out[1]).mean() < 0.5  # colours are converted, and cut to 0..255, before resizing


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "PNG", "BMP", "WEBP"])
def test_damaged_images_of_other_formats_are_read_or_said_to_be_damaged(kind: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    whole = np.frombuffer(file.getvalue(), dtype=np.uint8)
    draw = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        data = whole[: draw.integers(1, len(whole) + 1)].copy()
        for at in draw.integers(0, min(len(data), 200), 3):
            data[at] = draw.integers(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                jpeg_fallback.decode(data)
            except DataError:
                refused += 1
    assert refused > 20
