"""Images from packs: which box of each, and the pixels beside Pillow's and torch's."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError
from shoal.data.loader import Loader
from shoal.data.loading.crops import ImageOptions, boxes_of, middle_boxes, random_boxes
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import Pack
from shoal.data.pack.writer import pack
from tests.data.packs import images_pack

NUM_IMAGES = 23


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images_pack(tmp_path_factory.mktemp("packs") / "images.pack", NUM_IMAGES)


def pixels_of(path: Path, sample: int) -> torch.Tensor:
    from PIL import Image

    with Image.open(io.BytesIO(Pack(path)[sample]["image"])) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def resized(pixels: torch.Tensor, box: list[float], size: int, *, flip: bool, antialias: bool) -> torch.Tensor:
    x, y, w, h = (int(number) for number in box)
    cropped = pixels[None, :, y : y + h, x : x + w].float()
    out = F.interpolate(cropped, (size, size), mode="bilinear", align_corners=False, antialias=antialias)[0]
    return out.flip(2) if flip else out


@pytest.mark.parametrize("antialias", [False, True])
def test_training_images_are_the_drawn_box_resized(images: Path, antialias: bool) -> None:
    options = ImageOptions(size=32, antialias=antialias)
    for batch in Loader(images, batch_size=6, image=options, seed=7):
        assert batch["image"].dtype == torch.uint8
        for found, sample in zip(batch["image"], batch["label"].tolist(), strict=True):
            pixels = pixels_of(images, sample)
            size = np.array([[pixels.shape[2], pixels.shape[1]]], dtype=np.int32)
            boxes, flips = boxes_of(options, size, np.array([sample]), seed=7, epoch=0)
            wanted = resized(pixels, boxes[0].tolist(), 32, flip=bool(flips[0]), antialias=antialias)
            # Chroma is resized from its own, coarser grid: small differences at edges of colours.
            assert (found.float() - wanted).abs().mean() < 4


@settings(max_examples=30)
@given(width=st.integers(1, 900), height=st.integers(1, 900), seed=st.integers(0, 1000))
def test_boxes_lie_inside_their_image(width: int, height: int, seed: int) -> None:
    sizes = np.full((50, 2), (width, height), dtype=np.int32)
    samples = np.arange(50)
    for options in (ImageOptions(), ImageOptions(train=False), ImageOptions(train=False, size=(96, 224), resize=256)):
        boxes, _ = boxes_of(options, sizes, samples, seed=seed, epoch=1)
        x, y, w, h = boxes.T
        assert (x >= 0).all()
        assert (y >= 0).all()
        assert (w > 0).all()
        assert (h > 0).all()
        assert (x + w <= width + 1e-9).all()
        assert (y + h <= height + 1e-9).all()


def test_random_boxes_have_the_areas_and_ratios_that_were_asked_for() -> None:
    sizes = np.full((4000, 2), (500, 375), dtype=np.int32)
    options = ImageOptions()
    boxes, flips = boxes_of(options, sizes, np.arange(4000), seed=0, epoch=0)
    areas, ratios = boxes[:, 2] * boxes[:, 3] / (500 * 375), boxes[:, 2] / boxes[:, 3]
    assert areas.min() >= 0.075
    assert areas.max() <= 1.0
    assert 0.73 < ratios.min() < ratios.max() < 1.36
    assert 0.42 < areas.mean() < 0.56  # uniform from 0.08 to 1 would be 0.54; the largest do not fit in every ratio
    assert 0.46 < flips.mean() < 0.54


def test_an_image_that_no_box_fits_into_gives_its_middle() -> None:
    sizes = np.array([[1000, 10], [10, 1000]], dtype=np.int32)
    draws = np.full((2, 22), 0.999)
    assert random_boxes(sizes, draws, scale=(0.9, 1.0), ratio=(3 / 4, 4 / 3)).tolist() == [
        [493, 0, 13, 10],
        [0, 493, 10, 13],
    ]


def test_evaluation_takes_the_middle_of_the_resized_image() -> None:
    box = middle_boxes(np.array([[500, 375]], dtype=np.int32), ImageOptions(train=False, resize=256))[0]
    assert box == pytest.approx([58 * 500 / 341, 16 * 375 / 256, 224 * 500 / 341, 224 * 375 / 256])


def batches(path: Path, **options: Any) -> dict[int, torch.Tensor]:
    image = ImageOptions(size=24, antialias=False)
    loader = Loader(path, image=image, copy=True, **options)
    return {label: each for b in loader for label, each in zip(b["label"].tolist(), b["image"], strict=True)}


def test_augmentation_depends_on_seed_epoch_and_sample_alone(images: Path) -> None:
    alone = batches(images, batch_size=8)
    assert sorted(alone) == list(range(NUM_IMAGES))
    for options in (
        {"threads": 3, "batch_size": 5},
        {"shuffle": False, "batch_size": 23},
        {"batch_size": 8, "workers": 2},
    ):
        found = batches(images, **options)
        assert all(torch.equal(found[label], alone[label]) for label in alone)
    for index in range(3):
        part = batches(images, batch_size=10, shares=(0.2, 0.5, 0.3), index=index)
        assert all(torch.equal(part[label], alone[label]) for label in part)
    other = batches(images, batch_size=8, seed=1)
    assert any(not torch.equal(other[label], alone[label]) for label in alone)


def test_the_same_pixels_come_from_a_pack_without_restart_segments(images: Path, tmp_path: Path) -> None:
    plain = images_pack(tmp_path / "plain.pack", NUM_IMAGES, restart_blocks=0)
    segments, whole = batches(images, batch_size=8), batches(plain, batch_size=8)
    assert all(torch.equal(segments[label], whole[label]) for label in segments)


def test_evaluation_is_the_same_in_every_epoch_and_in_either_layout(images: Path) -> None:
    options = ImageOptions(size=24, train=False)
    first, second = (next(iter(Loader(images, batch_size=23, shuffle=False, image=options, seed=s))) for s in (0, 1))
    assert torch.equal(first["image"], second["image"])
    last = ImageOptions(size=24, train=False, channels_last=True)
    other = next(iter(Loader(images, batch_size=23, shuffle=False, image=last)))
    assert torch.equal(other["image"].permute(0, 3, 1, 2), first["image"])


def test_without_options_images_come_encoded(images: Path) -> None:
    batch = next(iter(Loader(images, batch_size=4, shuffle=False)))
    assert batch["image"] == [Pack(images)[n]["image"] for n in range(4)]


def test_a_damaged_image_is_named(images: Path, tmp_path: Path) -> None:
    good = Pack(images)[0]["image"]
    path = tmp_path / "bad.pack"
    rows = [{"image": good, "blob": b""}, {"image": good, "blob": b""}]
    pack(rows, path, restart_blocks=0, compression="none", report=Quiet())
    part = next((path / "parts").glob("*.arrow"))
    content = part.read_bytes()
    at = content.rindex(good[:64])
    part.write_bytes(content[:at] + b"\0" * 64 + content[at + 64 :])
    with pytest.raises(DataError, match=r"sample 1 of .*bad.pack, column 'image'"):
        list(Loader(path, batch_size=1, columns=["image"], image=ImageOptions(size=16), shuffle=False))


def test_options_that_make_no_sense_are_refused() -> None:
    for wrong, sentence in [
        ({"size": 0}, "size=0"),
        ({"scale": (0.5, 0.1)}, "two fractions, the smaller first"),
        ({"ratio": (2.0, 1.0)}, "two ratios, the smaller first"),
        ({"resize": 100}, "is smaller than size=224"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            ImageOptions(**wrong)  # type: ignore[arg-type]
