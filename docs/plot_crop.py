"""Draws docs/images/crop.svg, which segments of a JPEG a crop is decoded from: python docs/plot_crop.py."""

from collections.abc import Iterator
from pathlib import Path

# A photograph of 450x350, 4:2:0: blocks of 16x16, a restart marker every 2 of them.
WIDTH, HEIGHT, BLOCK = 450, 350, 16
ACROSS = 2 * BLOCK
"""The width of a segment."""
BOX = (141, 101, 200, 150)
"""x, y, width, height of the crop."""
LEFT, TOP, GAP = 16, 44, 90
BLUE, ORANGE, GREY = "#56b4e9", "#e69f00", "#e4e4e4"  # told apart by the colour-blind (Okabe and Ito)


def needed() -> tuple[int, int, int, int]:
    """Return x, y, width, height of the segments that the crop needs: with a sample of chroma around it, 2 pixels."""
    x, y, w, h = BOX
    left, right = (x - 2) // ACROSS * ACROSS, min(-(-(x + w + 2) // ACROSS) * ACROSS, WIDTH)
    top, bottom = (y - 2) // BLOCK * BLOCK, min(-(-(y + h + 2) // BLOCK) * BLOCK, HEIGHT)
    return left, top, right - left, bottom - top


def count(width: int, height: int) -> int:
    """Return how many segments there are in so many pixels."""
    return -(-width // ACROSS) * -(-height // BLOCK)


def _grid(x: int, y: int, w: int, h: int) -> str:
    """Return white lines between segments."""
    down = "".join(f"M{x + at} {y}v{h}" for at in range(ACROSS, w, ACROSS))
    along = "".join(f"M{x} {y + at}h{w}" for at in range(BLOCK, h, BLOCK))
    return f'<path d="{down}{along}" stroke="white"/>'


def _rectangle(x: float, y: float, w: float, h: float, style: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" {style}/>'


def _text(x: float, y: float, line: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="13" text-anchor="{anchor}" fill="#111">{line}</text>'


def drawing() -> Iterator[str]:
    """Yield the shapes: the file with its segments, and those of them that are decoded."""
    x, y, w, h = BOX
    left, top, width, height = needed()
    all_of, some = count(WIDTH, HEIGHT), count(width, height)
    crop = f'fill="none" stroke="{ORANGE}" stroke-width="3"'
    yield _text(LEFT, TOP - 14, f"a JPEG of {WIDTH} x {HEIGHT}: {all_of} segments, each found by the index")
    yield _rectangle(LEFT, TOP, WIDTH, HEIGHT, f'fill="{GREY}"')
    yield _rectangle(LEFT + left, TOP + top, width, height, f'fill="{BLUE}"')
    yield _grid(LEFT, TOP, WIDTH, HEIGHT)
    yield _rectangle(LEFT + x, TOP + y, w, h, crop)
    right, middle = LEFT + WIDTH, TOP + y + h / 2
    arrow = f"M {right + 10} {middle:g} h {GAP - 30} m -9 -6 l 9 6 l -9 6"
    yield f'<path d="{arrow}" fill="none" stroke="#333" stroke-width="2"/>'
    there = right + GAP
    yield _text(there, TOP + top - 12, f"decoded: {some} of {all_of} segments, {some / all_of:.0%}")
    yield _rectangle(there, TOP + top, width, height, f'fill="{BLUE}"')
    yield _grid(there, TOP + top, width, height)
    yield _rectangle(there + x - left, TOP + y, w, h, crop)
    yield _text(there, TOP + top + height + 22, f"the crop of {w} x {h}, then resized to 224 x 224")


def main() -> None:
    """Write the picture."""
    width, height = LEFT + WIDTH + GAP + 290, TOP + HEIGHT + 16
    body = "\n".join(drawing())
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" role="img" '
        f'aria-label="A crop of a JPEG is decoded from the segments that it touches">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )
    (Path(__file__).parent / "images" / "crop.svg").write_text(svg)


if __name__ == "__main__":
    main()
