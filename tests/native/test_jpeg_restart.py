"""JPEGs cut into segments by shoal's own C: the same pixels, the same metadata, and libjpeg is not asked."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shoal.core.errors import DataError
from shoal.native import jpeg, jpeg_restart
from shoal.native.jpeg_library import UNSUPPORTED
from shoal.native.jpeg_restart import Cuts
from tests.native.fuzz_jpegs import damaged
from tests.native.jpegs import encode, picture, reference

SAMPLINGS = ["4:2:0", "4:2:2", "4:4:4", "4:4:0", "grey"]


@pytest.fixture
def without_libjpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what the fast way refuses as it is."""
    monkeypatch.setattr(jpeg_restart, "jpeg_library", lambda: None)


def cut_alone(image: bytes, restart_blocks: int, *, portable: bool = False) -> tuple[bytes, bytes]:
    """Return an image as the fast way cuts it, which must not refuse."""
    cuts = Cuts([image], restart_blocks, portable=portable)
    assert not cuts.left
    (values, _), (index, _) = cuts.collect(np.zeros(1, np.int64))
    return values.tobytes(), index.tobytes()


@settings(max_examples=150, deadline=None)
@given(
    sampling=st.sampled_from(SAMPLINGS),
    width=st.integers(1, 90),
    height=st.integers(1, 70),
    restart_blocks=st.sampled_from([1, 2, 3, 7, 200]),
    quality=st.sampled_from([5, 30, 88, 100]),
    optimize=st.booleans(),
    own=st.sampled_from([0, 1, 2, 5, 13]),
)
def test_every_baseline_file_is_cut_and_keeps_its_pixels(
    sampling: str, width: int, height: int, restart_blocks: int, quality: int, optimize: bool, own: int
) -> None:
    options = {} if sampling == "4:4:0" else {"optimize": optimize, "restart_marker_blocks": own}
    original = encode(picture(width, height, seed=width), sampling, quality, **options)
    cut, index = cut_alone(original, restart_blocks)
    whole = reference(original)
    assert np.array_equal(reference(cut), whole)
    assert np.array_equal(jpeg.decode(cut, index), whole)
    box = (width // 3, height // 4, width - width // 3, height - height // 4)
    assert np.array_equal(jpeg.decode(cut, index, box), whole[box[1] :, box[0] :])
    assert (cut, index) == cut_alone(original, restart_blocks, portable=True)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_file_that_is_cut_already_is_cut_anew_to_the_same_bytes(sampling: str) -> None:
    original = encode(picture(150, 90), sampling)
    wanted = cut_alone(original, 2)
    for blocks in (1, 2, 3, 5, 32767):
        assert cut_alone(cut_alone(original, blocks)[0], 2) == wanted


@pytest.mark.parametrize("level", [0, 17, 128, 255])
def test_tables_that_lack_the_sizes_of_whole_values_get_them(level: int) -> None:
    pixels = np.full((40, 60, 3), level, np.uint8)
    pixels[5:9, 7:12] ^= 3
    original = encode(pixels, "4:2:0", 100, optimize=True)
    cut, index = cut_alone(original, 1)
    assert np.array_equal(reference(cut), reference(original))
    assert np.array_equal(jpeg.decode(cut, index, (20, 20, 9, 9)), reference(original)[20:29, 20:29])


def markers(image: bytes) -> list[tuple[int, bytes]]:
    """Return all markers before the scan with their contents, but for tables and restart intervals."""
    found, at = [], 2
    while image[at + 1] != 0xDA:
        length = int.from_bytes(image[at + 2 : at + 4], "big")
        found.append((image[at + 1], image[at + 4 : at + 2 + length]))
        at += 2 + length
    return [(marker, content) for marker, content in found if marker not in (0xC4, 0xDD)]


def test_every_other_marker_stays_as_it_is_and_in_its_order() -> None:
    exif = Image.Exif()
    exif[0x010E] = "a description"
    original = encode(
        picture(40, 30), exif=exif.tobytes(), icc_profile=b"a profile" * 9000, comment=b"a comment", dpi=(72, 72)
    )
    cut, _ = cut_alone(original, 2)
    assert markers(cut) == markers(original)
    assert len(markers(original)) > 6, "two pieces of the profile among them"


def test_bytes_before_and_after_that_mean_nothing_do_not_matter() -> None:
    original = encode(picture(50, 40))
    wanted = cut_alone(original, 2)
    frame = original.index(b"\xff\xc0")
    assert cut_alone(original[:frame] + b"\xff\xff" + original[frame:], 2) == wanted
    assert cut_alone(original + b"what a camera leaves \xff\xd8", 2) == wanted
    assert cut_alone(original[:-2] + b"12\xff\x00" + original[-2:], 2) == wanted


def full_table(*differences: int) -> bytes:
    """Return a grey image 8 wide, one block for each DC difference of 0 or +-(16 to 31); its DC table has no room."""
    bits = "".join(
        ("0" if value == 0 else f"10{value if value > 0 else value + 31:05b}") + "0" for value in differences
    )
    bits += "1" * (-len(bits) % 8)
    scan = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\x00")
    height = 8 * len(differences)
    return b"".join(
        [
            b"\xff\xd8\xff\xdb\x00\x43\x00" + b"\x08" * 64,
            b"\xff\xc0\x00\x0b\x08" + height.to_bytes(2, "big") + b"\x00\x08\x01\x01\x11\x00",
            b"\xff\xc4\x00\x23\x00" + b"\x01" * 16 + b"\x00\x05" + bytes(14),  # 0 again and again, up to 16 bits
            b"\xff\xc4\x00\x14\x10\x01" + bytes(15) + b"\x00",
            b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + scan + b"\xff\xd9",
        ]
    )


def test_a_table_without_room_is_used_while_it_suffices_and_left_to_libjpeg_else() -> None:
    enough = full_table(20, 0, -20, 0, 25, 0)
    assert np.array_equal(reference(cut_alone(enough, 1)[0]), reference(enough))
    lacking = full_table(31, 31, 0, 0)
    assert Cuts([lacking], 1).left == {0: UNSUPPORTED}
    cut, index = jpeg.transcode(lacking, 1)
    assert index
    assert np.array_equal(jpeg.decode(cut, index), reference(lacking))


@pytest.mark.usefixtures("without_libjpeg")
def test_without_libjpeg_baseline_files_are_cut_and_others_left() -> None:
    assert jpeg.available()
    assert jpeg.transcode(encode(picture(61, 47)))[1]
    for other in (encode(picture(61, 47), progressive=True), encode(picture(61, 47), "4:4:4", keep_rgb=True)):
        assert jpeg.transcode(other) == (other, b"")
    with pytest.raises(DataError, match="cut short or is damaged"):
        jpeg.transcode(encode(picture(61, 47))[:-40])


@pytest.mark.parametrize("own", [0, 3])
def test_wherever_a_file_is_cut_short_it_is_refused(own: int) -> None:
    original = encode(picture(70, 50), restart_marker_blocks=own)
    lengths = sorted({*range(0, len(original), 37), *range(len(original) - 40, len(original))})
    cuts = Cuts([original[:length] for length in lengths], 2)
    assert len(cuts.left) == len(lengths)
    whole_end = [original[:length] + b"\xff\xd9" for length in lengths if length > original.index(b"\xff\xda") + 14]
    left = len(Cuts(whole_end, 2).left)
    assert left >= len(whole_end) - 3, "all but those that lack nothing, or nothing but the ones at the end"


def test_many_images_at_once_come_out_as_each_by_itself() -> None:
    images = [encode(picture(40 + at, 30 + at, seed=at), SAMPLINGS[at % 5]) for at in range(40)]
    images[7], images[8] = encode(picture(40, 30), progressive=True), b"no image"
    cuts = Cuts(images, 2)
    assert list(cuts.left) == [7, 8]
    cuts.put(7, b"stored instead", b"its index")
    kept = np.array([at for at in range(40) if at not in (3, 8)])
    (values, offsets), (index, index_offsets) = cuts.collect(kept)
    for place, at in enumerate(kept.tolist()):
        found = values[offsets[place] : offsets[place + 1]].tobytes()
        of_it = index[index_offsets[place] : index_offsets[place + 1]].tobytes()
        assert (found, of_it) == ((b"stored instead", b"its index") if at == 7 else cut_alone(images[at], 2))


def test_damaged_images_do_not_change_those_beside_them() -> None:
    random = np.random.default_rng(0)
    whole = [encode(picture(90 + at, 70, seed=at), SAMPLINGS[at % 5], optimize=at % 2 == 0) for at in range(30)]
    images = [damaged(image, random) if at % 3 else image for at, image in enumerate(whole)]
    for portable in (False, True):
        cuts = Cuts(images, 2, portable=portable)
        (values, offsets), (index, index_offsets) = cuts.collect(np.arange(len(images)))
        assert len(cuts.left) >= 5
        for at, image in enumerate(images):
            alone = Cuts([image], 2, portable=not portable)
            assert cuts.left.get(at) == alone.left.get(0)
            (one, _), (one_index, _) = alone.collect(np.zeros(1, np.int64))
            assert values[offsets[at] : offsets[at + 1]].tobytes() == one.tobytes()
            assert index[index_offsets[at] : index_offsets[at + 1]].tobytes() == one_index.tobytes()


def test_large_and_small_images_in_one_call_are_each_cut_as_alone() -> None:
    sizes = [(700, 500), (9, 9), (16, 16), (1, 1), (650, 8), (8, 650), (33, 17), (300, 300), (17, 1)]
    images = [encode(picture(*size, seed=at), quality=100 if at % 2 else 40) for at, size in enumerate(sizes)]
    cuts = Cuts(images, 2)
    assert not cuts.left
    (values, offsets), (index, index_offsets) = cuts.collect(np.arange(len(images)))
    for at, image in enumerate(images):
        cut, of_it = values[offsets[at] : offsets[at + 1]].tobytes(), index[index_offsets[at] : index_offsets[at + 1]]
        assert (cut, of_it.tobytes()) == cut_alone(image, 2)
        assert np.array_equal(jpeg.decode(cut, of_it.tobytes()), reference(image))


def test_blocks_that_fill_all_coefficients_end_without_saying_so() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    original = encode(noise, "4:4:4", 100)
    cut, index = cut_alone(original, 1)
    assert np.array_equal(jpeg.decode(cut, index), reference(original))
    assert (cut, index) == cut_alone(original, 1, portable=True)


def test_images_may_also_be_none() -> None:
    cuts = Cuts([], 2)
    (values, offsets), (index, _) = cuts.collect(np.empty(0, np.int64))
    assert (len(values), len(index), offsets.tolist()) == (0, 0, [0])


def test_exif_of_a_cut_file_is_read_by_pillow() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(io.BytesIO(cut_alone(encode(picture(40, 30), exif=exif.tobytes()), 2)[0])) as image:
        assert image.getexif()[0x0112] == 6
