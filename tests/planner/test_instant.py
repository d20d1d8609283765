"""The planner is arithmetic: importing it takes neither torch nor numpy with it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_planner_never_imports_torch_or_numpy() -> None:
    files = sorted((ROOT / "shoal" / "planner").rglob("*.py"))
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.stem != "__init__"]
    assert len(modules) > 30
    script = f"import sys, {', '.join(modules)}; assert not {{'torch', 'numpy', 'scipy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
