"""What many noisy measurements say: the typical one, and how a rate grows with the amount."""

from collections.abc import Sequence


def typical(seconds: Sequence[float]) -> float:
    """Return the mean of the faster half of repeats: what disturbs a measurement only ever makes it slower.

    The fastest quarter alone promised too much: steps took 10 to 19% longer than predicted by it, and by the middle
    one 7 to 11% less where the machine was calm (2 cores with noisy neighbours, 2026-11).
    """
    faster = sorted(seconds)[: (len(seconds) + 1) // 2]
    return sum(faster) / len(faster)


def fit_half_rate(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (full, half) of rate(x) = full * x / (x + half), for points (x, seconds): the amounts and what they took.

    By the least squares of relative errors: seconds = x * slope + start, so full = 1 / slope, half = start / slope.
    Example: 1, 9 and 999 operations in 2, 10 and 1000 s: the full rate is 1 a second, half of it at 1 operation.
    """
    # 1 = slope * x / seconds + start / seconds, for all points.
    rows = [(x / seconds, 1 / seconds) for x, seconds in points]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        slope, start = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if slope > 0 and start > 0:
            return 1 / slope, start / slope
    return aa / a, 0.0  # one size, or larger ones that are not faster: a constant rate
