"""Draws docs/images/mesh.svg, eight workers along three axes: python docs/plot_mesh.py."""

from collections.abc import Iterator
from pathlib import Path

# Blue and orange are told apart by the colour-blind (Okabe and Ito); lighter for the first shard.
COLOURS = {(0, 0): "#a6cee3", (0, 1): "#56b4e9", (1, 0): "#fdd49e", (1, 1): "#e69f00"}
WIDTH, HEIGHT, BOX_WIDTH, BOX_HEIGHT = 760, 270, 130, 84


def main() -> None:
    """Draw a mesh of 8 workers: pipeline=2, shard=2, tensor=2."""
    body = "\n".join([*_boxes(), *_labels()])
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'role="img" aria-label="A mesh of 8 workers: two stages, two shards, two halves of each layer">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )
    (Path(__file__).parent / "images" / "mesh.svg").write_text(svg)


def _boxes() -> Iterator[str]:
    for worker in range(8):
        pipeline, shard, tensor = worker // 4, worker // 2 % 2, worker % 2
        x, y = 130 + pipeline * 320 + tensor * (BOX_WIDTH + 10), 50 + shard * (BOX_HEIGHT + 16)
        lines = (
            f"worker {worker}",
            f"blocks {'0-3' if pipeline == 0 else '4-7'}",
            f"{('left', 'right')[tensor]} heads",
        )
        fill = COLOURS[pipeline, shard]
        yield f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{fill}"/>'
        for number, line in enumerate(lines):
            weight = ' font-weight="bold"' if number == 0 else ""
            yield _text(x + BOX_WIDTH / 2, y + 26 + 21 * number, line, extra=weight)


def _labels() -> Iterator[str]:
    for stage in range(2):
        yield _text(130 + stage * 320 + BOX_WIDTH + 5, 34, f"stage {stage}", extra=' font-weight="bold"')
    for shard in range(2):
        y = 50 + shard * (BOX_HEIGHT + 16) + BOX_HEIGHT / 2
        yield _text(66, y, f"shard {shard}")
        yield _text(66, y + 18, f"samples {'0-7' if shard == 0 else '8-15'}")
        yield f'<path d="M 405 {y} L 443 {y} m -8 -5 l 8 5 l -8 5" fill="none" stroke="#333" stroke-width="2"/>'
    yield _text(424, 158, "activations")


def _text(x: float, y: float, line: str, *, extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="14" text-anchor="middle" fill="#111"{extra}>{line}</text>'


if __name__ == "__main__":
    main()
