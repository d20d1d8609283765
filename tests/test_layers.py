"""The rooms and who may import whom, read off the source; torch stays out of the rooms that must be instant."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shoal"

# From the top down: a room imports only from lines below its own; rooms on one line never import each other.
LINES = [
    {"cli"},
    {"bench"},
    {"api", "lightning"},
    {"training", "tasks", "report", "doctor"},
    {"sync", "parallel", "fault", "data", "planner", "launch"},
    {"compress", "profile"},
    {"comm"},
    {"spec"},
    {"native"},
    {"core"},
]
HEIGHT = {room: len(LINES) - number for number, line in enumerate(LINES) for room in line}

# These never import torch when they are imported; a function inside may.
TORCHLESS = {"core", "spec", "planner", "report", "doctor", "cli", "launch"}


def imports(source: str, *, only_top: bool = False) -> Iterator[str]:
    """Yield the full names of the modules that `source` imports; with `only_top`, those at import time."""
    tree = ast.parse(source)
    nodes: Iterator[ast.AST] = iter(tree.body) if only_top else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == "shoal" else [module]


def violations(room: str, source: str) -> list[str]:
    """Return what `source`, a module of `room`, imports against the rules."""
    found = []
    for name in imports(source):
        other = name.split(".")[1] if name.startswith("shoal.") else None
        if other is not None and other != room and HEIGHT.get(other, 0) >= HEIGHT[room]:
            found.append(name)
    if room in TORCHLESS:
        found += [name for name in imports(source, only_top=True) if name.split(".")[0] == "torch"]
    return found


def modules() -> list[tuple[str, Path]]:
    """Return every module in a room, with its room."""
    files = [path for path in PACKAGE.rglob("*.py") if path.name not in ("__main__.py",) and path.parent != PACKAGE]
    return [(path.relative_to(PACKAGE).parts[0], path) for path in files]


@pytest.mark.parametrize(("room", "path"), modules(), ids=lambda v: str(v.relative_to(PACKAGE)) if v != str(v) else v)
def test_a_module_imports_only_from_rooms_below(room: str, path: Path) -> None:
    assert room in HEIGHT, f"{room} is a new room: give it its line"
    assert violations(room, path.read_text()) == []


@pytest.mark.parametrize(
    ("room", "planted"),
    [
        ("data", "from shoal.training.step import Stepper"),
        ("core", "import shoal.spec.job"),
        ("sync", "from shoal.parallel import replicate"),
        ("planner", "import torch"),
        ("report", "from torch import nn"),
        ("training", "def f():\n    from shoal.report import page"),
        ("spec", "from shoal import planner"),
    ],
)
def test_a_planted_violation_is_seen(room: str, planted: str) -> None:
    assert violations(room, planted) != []


def test_only_comm_names_process_groups() -> None:
    words = ("init_process_group", "new_group", "ProcessGroup", "get_world_size", "get_rank", "all_reduce(", "barrier(")
    for room, path in modules():
        text = path.read_text()
        if room not in ("comm", "bench"):  # bench also runs the peers as people write them
            named = [word for word in words if f"dist.{word}" in text]
            assert named == [], f"{path} names {named}"


def test_only_comm_rank_reads_rank_variables() -> None:
    for room, path in modules():
        if path.name != "rank.py" and room != "launch":
            for word in ("WORLD_SIZE", "SLURM_PROCID", "MASTER_ADDR", '"RANK"'):
                assert word not in path.read_text(), f"{path} reads {word}"
