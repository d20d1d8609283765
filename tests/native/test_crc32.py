"""CRC-32 by shoal's own C is zlib's, whatever the length, the beginning and what came before."""

import os
import zlib

import numpy as np
import pytest

from shoal.native import crc32 as native_crc32
from shoal.native.crc32 import crc32


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 4095, 4096, 4097, 4096 + 63, 100_003, 1 << 20])
def test_it_is_the_checksum_of_zlib(num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    for before in (0, 1, 0x12345678, 0xFFFFFFFF):
        assert crc32(data, before) == zlib.crc32(data, before)
    assert crc32(bytes(num_bytes)) == zlib.crc32(bytes(num_bytes))


def test_nothing_changes_nothing() -> None:
    assert crc32(np.zeros(0, np.uint8).data, 5) == 5


def test_pieces_add_up_and_may_begin_anywhere() -> None:
    data = bytearray(os.urandom(300_000))
    value, place = 0, 0
    for length in np.random.default_rng(0).integers(0, 20_000, 100).tolist():
        value = crc32(memoryview(data)[place : place + length], value)
        place += length
    assert value == zlib.crc32(data[:place])


def test_where_the_processor_cannot_zlib_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_crc32, "_native", lambda: None)
    data = os.urandom(10_000)
    assert crc32(data, 7) == zlib.crc32(data, 7)
