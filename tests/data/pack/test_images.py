"""Images on their way into a pack: the same pixels come out, and JPEGs get the index of their restart segments."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shoal.core.errors import DataError
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import Pack
from shoal.data.pack.writer import pack
from shoal.native.jpeg import available
from tests.data.pack.sources import files_of, jpeg

needs_native = pytest.mark.skipif(not available(), reason="shoal was installed without its C part")


def pixels(encoded: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


@needs_native
def test_jpegs_get_an_index_and_keep_their_pixels(tmp_path: Path) -> None:
    images = [jpeg(100 + 8 * row, 60 + row, seed=row) for row in range(20)]
    rows = [{"image": image, "label": row} for row, image in enumerate(images)]
    for workers in (1, 3):
        path = tmp_path / f"{workers}.pack"
        pack(rows, path, part_bytes=20e3, workers=workers, restart_blocks=2, report=Quiet(), storage_bytes_per_s=1e12)
        opened = Pack(path)
        assert opened.columns["image"].extra["restart_blocks"] == 2
        assert opened.columns["image"].compression == "none", "nothing is unpacked so fast"
        assert np.all(np.diff(opened.offsets(0, "image.index")) > 0)
        for row, image in enumerate(images):
            np.testing.assert_array_equal(pixels(opened[row]["image"]), pixels(image))
    assert files_of(tmp_path / "1.pack") == files_of(tmp_path / "3.pack")


def test_without_restart_blocks_the_bytes_are_those_of_the_source(tmp_path: Path) -> None:
    image = jpeg()
    png = io.BytesIO()
    Image.fromarray(pixels(image)).save(png, "png")
    pack([{"image": image}, {"image": png.getvalue()}], tmp_path / "a.pack", restart_blocks=0, report=Quiet())
    opened = Pack(tmp_path / "a.pack")
    assert [opened[0]["image"], opened[1]["image"]] == [image, png.getvalue()]
    assert "image.index" not in opened.manifest.parts[0].num_values


@pytest.mark.parametrize("restart_blocks", [0, 2])
def test_a_truncated_jpeg_is_named_or_skipped(restart_blocks: int, tmp_path: Path) -> None:
    rows = [{"image": jpeg(seed=row)} for row in range(100)]
    rows[77] = {"image": rows[77]["image"][:-300]}
    with pytest.raises(DataError, match="row 77: column 'image': the JPEG is truncated"):
        pack(rows, tmp_path / "a.pack", restart_blocks=restart_blocks, report=Quiet())
    assert list(tmp_path.iterdir()) == []
    manifest = pack(rows, tmp_path / "a.pack", restart_blocks=restart_blocks, on_error="skip", report=Quiet())
    assert (manifest.num_rows, manifest.skipped) == (99, 1)


@needs_native
def test_a_jpeg_with_a_damaged_middle_is_named(tmp_path: Path) -> None:
    rows = [{"image": jpeg(seed=row)} for row in range(80)]
    whole = rows[70]["image"]
    cut = len(whole) // 2
    rows[70] = {"image": whole[:cut] + whole[-2:]}  # the end marker is there, half of the data is not
    with pytest.raises(DataError, match="row 70: column 'image'"):
        pack(rows, tmp_path / "a.pack", restart_blocks=2, report=Quiet())


@needs_native
@pytest.mark.parametrize("workers", [1, 3])
def test_images_that_cannot_be_cut_lie_among_those_that_are(workers: int, tmp_path: Path) -> None:
    images = [jpeg(seed=row) for row in range(30)]
    for row, (kind, options) in {3: ("png", {}), 4: ("jpeg", {"progressive": True}), 9: ("webp", {})}.items():
        file = io.BytesIO()
        Image.fromarray(pixels(images[row])).save(file, kind, **options)
        images[row] = file.getvalue()
    bad = {7: b"<html>not found</html>", 8: images[8][:-200], 20: images[20][:300] + images[20][-2:]}
    rows = [{"image": bad.get(row, image), "label": row} for row, image in enumerate(images)]
    path = tmp_path / "a.pack"
    manifest = pack(rows, path, workers=workers, on_error="skip", compression="none", report=Quiet())
    assert (manifest.num_rows, manifest.skipped) == (27, 3)
    opened = Pack(path)
    indexed = np.diff(opened.offsets(0, "image.index")) > 0
    for row in range(27):
        label = int(opened[row]["label"])
        assert label not in bad
        assert indexed[row] == (label not in (3, 4, 9))
        np.testing.assert_array_equal(pixels(opened[row]["image"]), pixels(images[label]))
