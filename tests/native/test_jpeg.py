"""Segments of JPEGs: the same pixels as a whole decode by libjpeg, which Pillow has."""

import ctypes
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shoal.core.errors import DataError
from shoal.native import jpeg, jpeg_restart
from shoal.native.jpeg_library import whole_decoder
from shoal.native.library import library
from tests.native.jpegs import column, encode, picture, reference, two_sizes

SAMPLINGS = ["4:2:0", "4:2:2", "4:4:4", "4:4:0", "grey"]


def test_the_jpeg_library_was_compiled_with_shoal() -> None:
    assert jpeg.available(), "install a C compiler and run: python build_native.py"
    assert whole_decoder(), "install libjpeg62-turbo-dev (or libjpeg-turbo-devel) and run: python build_native.py"


@settings(max_examples=150, deadline=None)
@given(
    sampling=st.sampled_from(SAMPLINGS),
    width=st.integers(1, 90),
    height=st.integers(1, 70),
    restart_blocks=st.sampled_from([1, 2, 3, 7, 200]),
    quality=st.sampled_from([30, 88, 100]),
    data=st.data(),
)
def test_any_box_has_the_pixels_of_a_whole_decode(
    sampling: str, width: int, height: int, restart_blocks: int, quality: int, data: st.DataObject
) -> None:
    original = encode(picture(width, height, seed=width), sampling, quality)
    whole = reference(original)
    cut, index = jpeg.transcode(original, restart_blocks)
    assert np.array_equal(reference(cut), whole)
    assert jpeg.size_of(cut) == (width, height)
    w, h = data.draw(st.integers(1, width)), data.draw(st.integers(1, height))
    x, y = data.draw(st.integers(0, width - w)), data.draw(st.integers(0, height - h))
    assert np.array_equal(jpeg.decode(cut, index, (x, y, w, h)), whole[y : y + h, x : x + w])
    assert np.array_equal(jpeg.decode(cut, index), whole)
    assert np.array_equal(jpeg.decode(original, None, (x, y, w, h)), whole[y : y + h, x : x + w])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 5), (7, 9), (16, 16), (17, 33), (31, 8), (8, 49), (64, 64)])
def test_tiny_images_and_edges_of_blocks_come_out_the_same(sampling: str, size: tuple[int, int]) -> None:
    original = encode(picture(*size), sampling)
    cut, index = jpeg.transcode(original, 2)
    whole = reference(original)
    assert np.array_equal(jpeg.decode(cut, index), whole)
    for x in range(size[0]):  # one column, one row at a time: every edge of every block
        assert np.array_equal(jpeg.decode(cut, index, (x, 0, 1, size[1])), whole[:, x : x + 1])
    for y in range(size[1]):
        assert np.array_equal(jpeg.decode(cut, index, (0, y, size[0], 1)), whole[y : y + 1])


def test_flat_and_extreme_pictures_come_out_the_same() -> None:
    black_and_white = np.kron(np.indices((30, 40)).sum(0) % 2 * 255, np.ones((3, 3))).astype(np.uint8)
    for pixels in (np.full((50, 60, 3), 77, np.uint8), np.repeat(black_and_white[..., None], 3, axis=2)):
        for quality in (1, 50, 100):
            original = encode(pixels, "4:2:0", quality)
            assert np.array_equal(jpeg.decode(*jpeg.transcode(original)), reference(original))


def test_metadata_comes_along() -> None:
    exif = Image.Exif()
    exif[0x010E] = "a description"
    original = encode(picture(40, 30), exif=exif.tobytes(), icc_profile=b"a profile" * 20, comment=b"a comment")
    with Image.open(io.BytesIO(jpeg.transcode(original)[0])) as image:
        assert image.getexif()[0x010E] == "a description"
        assert image.info["icc_profile"] == b"a profile" * 20
        assert image.info["comment"] == b"a comment"


def test_a_photograph_grows_by_little_and_the_same_each_time() -> None:
    original = encode(picture(450, 350))
    cut, index = jpeg.transcode(original, 2)
    assert (cut, index) == jpeg.transcode(original, 2)
    assert len(cut) + len(index) < 1.04 * len(original)
    assert jpeg.transcode(original, 0) == (original, b"")


def _others() -> dict[str, bytes]:
    pixels, cmyk = picture(61, 47), io.BytesIO()
    Image.fromarray(pixels).convert("CMYK").save(cmyk, "JPEG", quality=90)
    return {
        "progressive": encode(pixels, progressive=True),
        "progressive grey": encode(pixels, "grey", progressive=True),
        "rgb": encode(pixels, "4:4:4", keep_rgb=True),
        "cmyk": cmyk.getvalue(),
    }


@pytest.mark.parametrize("kind", ["progressive", "progressive grey", "rgb", "cmyk"])
def test_other_kinds_are_left_as_they_are_and_decoded_whole(kind: str) -> None:
    original = _others()[kind]
    assert jpeg.transcode(original) == (original, b"")
    whole = reference(original)
    assert np.array_equal(jpeg.decode(original), whole)
    assert np.array_equal(jpeg.decode(original, b"", (5, 6, 30, 20)), whole[6:26, 5:35])


@pytest.mark.parametrize("spread", [3, 60, 1000, 32767])
def test_the_transform_has_the_same_bits_with_and_without_vectors(spread: int) -> None:
    random, native = np.random.default_rng(spread), library()
    assert native is not None
    for _ in range(300):
        block = random.integers(-spread, spread + 1, 64).astype(np.int16)
        block[random.integers(1, 64) :] = 0
        out = np.zeros((2, 8, 8), np.uint8)
        for portable in (0, 1):
            to = ctypes.c_void_p(out[portable].ctypes.data)
            native.shoal_jpeg_idct(ctypes.c_void_p(block.ctypes.data), to, ctypes.c_int(portable))
        assert np.array_equal(out[0], out[1])


def test_what_is_cut_short_or_damaged_is_an_error() -> None:
    original = encode(picture(120, 90))
    for broken in (b"", b"\xff\xd8", b"not an image", original[:200], original[: len(original) // 2]):
        with pytest.raises(DataError, match="cannot be packed: it is not a JPEG, is cut short or is damaged"):
            jpeg.transcode(broken)
    with pytest.raises(DataError, match="cannot be decoded"):
        jpeg.decode(original[: len(original) // 2])
    with pytest.raises(DataError, match="has no size"):
        jpeg.size_of(original[:100])
    with pytest.raises(DataError, match="not between 0"):
        jpeg.transcode(original, -1)


def test_a_file_that_hides_another_image_is_refused_wherever_it_is_read() -> None:
    hostile, row, out = two_sizes(1600, 1600), np.zeros(1, np.int64), np.zeros((1, 3, 64, 64), np.uint8)
    assert reference(hostile).shape == (16, 16, 3), "libjpeg finds the small one"
    with pytest.raises(DataError, match="cannot be packed"):
        jpeg.transcode(hostile)
    with pytest.raises(DataError, match="has no size"):
        jpeg.size_of(hostile)
    with pytest.raises(DataError, match="cannot be decoded"):
        jpeg.decode(hostile, None, (1200, 1200, 100, 100))
    box = np.array([[1000.0, 1000.0, 300.0, 300.0]])
    said = jpeg.crop_resize_batch(*column([hostile]), None, None, None, row, box, None, out, antialias=True)
    assert list(said) == [0]


def test_a_whole_decode_of_another_size_than_the_header_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_small(data: int, size: int, room: int, planes: Any) -> int:
        planes[1] = planes[2] = 16  # its width and height
        return 0

    arguments = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    small = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(decode_small)
    monkeypatch.setattr(jpeg, "whole_decoder", lambda: ctypes.cast(small, ctypes.c_void_p))
    with pytest.raises(DataError, match="cannot be decoded"):
        jpeg.decode(encode(picture(80, 60), progressive=True), None, (40, 30, 20, 20))


def test_a_wrong_index_or_box_is_an_error() -> None:
    cut, index = jpeg.transcode(encode(picture(120, 90)))
    other = jpeg.transcode(encode(picture(120, 90, seed=1)))[1]
    for wrong in (other, index[:-1], index + b"\x01", b"\x01", b"\x02" + index[1:]):
        with pytest.raises(DataError, match="belongs to another image"):
            jpeg.decode(cut, wrong)
    for box in ((0, 0, 121, 90), (-1, 0, 5, 5), (0, 0, 0, 5), (100, 80, 21, 5), (0, 0, 5, 91)):
        with pytest.raises(DataError, match="not inside"):
            jpeg.decode(cut, index, box)


def test_without_libjpeg_its_kinds_are_left_to_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "whole_decoder", lambda: None)
    for original in (*_others().values(), encode(picture(61, 47))):
        assert np.array_equal(jpeg.decode(original, None, (5, 6, 30, 20)), reference(original)[6:26, 5:35])


def test_files_that_have_restart_markers_already_are_read_without_an_index() -> None:
    for restart_blocks in (1, 2, 5):
        cut, _ = jpeg.transcode(encode(picture(150, 90)), restart_blocks)
        assert np.array_equal(jpeg.decode(cut, None, (40, 33, 51, 20)), reference(cut)[33:53, 40:91])


def test_without_the_library_pillow_gives_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    original = encode(picture(61, 47))
    wanted = jpeg.decode(original, None, (5, 6, 30, 20))
    for module in (jpeg, jpeg_restart):
        monkeypatch.setattr(module, "library", lambda: None)
    assert not jpeg.available()
    assert jpeg.transcode(original) == (original, b"")
    assert jpeg.size_of(original) == (61, 47)
    assert np.array_equal(jpeg.decode(original, None, (5, 6, 30, 20)), wanted)


def test_damaged_files_and_indexes_are_refused_and_never_crash() -> None:
    assert _refused("3000") > 3000


def test_sanitizers_find_nothing_where_damaged_files_are_read() -> None:
    compiler = os.environ.get("CC", "cc")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not Path(runtime.stdout.strip()).is_absolute():
        pytest.skip(f"{compiler} has no sanitizers")
    assert _refused("600", "--sanitize") > 600


def _refused(*arguments: str) -> int:
    """Return how often damaged files were refused; a crash is an error."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.native.fuzz_jpegs", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[2])
