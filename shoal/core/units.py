"""Numbers as people read them."""


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
