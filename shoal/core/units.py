"""Numbers as people read and write them."""

import re

from shoal.core.errors import ConfigError

_MOST = 1e21
"""Of anything: no sum of such numbers overflows."""
_NUMBER = re.compile(r"\s*([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s]*)\s*")
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTP", start=1)}
_BYTES = {f"{prefix}B": size for prefix, size in {**_DECIMAL, **_BINARY}.items()}
_BITS = {f"{prefix}{word}": size / 8 for prefix, size in _DECIMAL.items() for word in ("b", "bit")}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_RATES = {f"{unit}{per}": size for unit, size in {**_BYTES, **_BITS}.items() for per in ("ps", "/s")}


def parse_bytes(text: str) -> float:
    """Return how many bytes `text` says: "100MB" (decimal), "1GiB" (binary), "1000" (plain bytes)."""
    return _parsed(text, {**_BYTES, **_DECIMAL}, "a number of bytes", "100MB, 1GiB or 1000")


def parse_rate(text: str) -> float:
    """Return the bytes per second that `text` says: "10Gbps" counts bits, "25GB/s" bytes."""
    rate = _parsed(text, _RATES, "a rate", "10Gbps (bits) or 1.25GB/s (bytes)")
    if rate < 1 / 8:
        raise ConfigError(f"{text!r} is not a rate: it must be 1bps or more.")
    return rate


def parse_seconds(text: str) -> float:
    """Return the seconds that `text` says: "20us", "1.5ms", "30min", "4h", "3" (plain seconds)."""
    return _parsed(text, {**_SECONDS, "": 1.0}, "a time", "20us, 1.5ms, 3s, 30min or 4h")


def _parsed(text: str, units: dict[str, float], what: str, examples: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in units:
        raise ConfigError(f"{text!r} is not {what}. Write it like {examples}.")
    value = float(match[1]) * units[match[2]]
    if not 0 <= value <= _MOST:
        raise ConfigError(f"{text!r} is not {what}: it must be {'1e21 at most' if value > 0 else '0 or more'}.")
    return value


def format_bytes(count: float) -> str:
    """Return `count` bytes in the largest fitting decimal unit: 1_234_567 -> '1.23 MB'."""
    return f"{_scaled(count)}B"


def format_count(count: float) -> str:
    """Return a plain count in the largest fitting decimal unit: 10_823_424 -> '10.8 M'."""
    return _scaled(count).rstrip()


def format_seconds(seconds: float) -> str:
    """Return a duration: '850 us', '12.3 ms', '4.20 s', '3 min 05 s', '2 h 10 min'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def _scaled(count: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} P"
