"""The checksum of a part's file: CRC-32 (zlib's), as 8 hexadecimal digits.

It finds damage, not forgery. Python has it, it runs without Python's lock, and at 14.6 GB/s on one core where shoal's C
does it (4.3 where zlib does; an EPYC of 3.5 GHz, 2026-11) it is faster than most storage that it watches over.

Bits are the coefficients of a polynomial, and the checksum is what is left of it after a division by CRC-32's. To put n
bytes behind those that are summed up is to multiply by x^(8 n): so a file whose beginning is written last is summed up
in pieces, and joined.

Example: "ab" is the checksum of "a", times x^8, plus that of "b" (plus and minus are xor).
"""

from pathlib import Path

from shoal.native.crc32 import crc32

_PIECE_BYTES = 4 << 20
_POLYNOMIAL = 0xEDB88320
"""CRC-32's, without x^32. The highest bit is that of x^0, the lowest that of x^31."""
_ONE, _X_8 = 1 << 31, 1 << 23


class Checksum:
    """The checksum of bytes that come in pieces."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, piece: bytes | bytearray | memoryview) -> None:
        """Take in the next piece."""
        self._value = crc32(piece, self._value)

    def join(self, next_piece: "Checksum", num_bytes: int) -> None:
        """Take in the next piece of `num_bytes`, which has been summed up by itself."""
        self._value = _times(self._value, _power(_X_8, num_bytes)) ^ next_piece._value

    def hex(self) -> str:
        """Return the checksum of all pieces so far."""
        return f"{self._value:08x}"


def file_checksum(path: Path) -> str:
    """Return the checksum of a file."""
    checksum, buffer = Checksum(), bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum.update(memoryview(buffer)[:count])
    return checksum.hex()


def _times(first: int, second: int) -> int:
    """Return the product of two polynomials, of which CRC-32's has been taken out."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= second if first >> bit & 1 else 0
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)  # times x
    return product


def _power(base: int, exponent: int) -> int:
    power = _ONE
    while exponent:
        power = _times(power, base) if exponent & 1 else power
        base, exponent = _times(base, base), exponent >> 1
    return power
