"""Files that the tests of sweeps search."""

from pathlib import Path

BOWL = """
def objective(trial):
    x = trial.suggest_float("x", -4, 4)
    y = trial.suggest_int("y", 0, 3)
    return (x - 1) ** 2 + y
"""

GRID = """
def objective(trial):
    a = trial.suggest_categorical("a", ["one", "two"])
    b = trial.suggest_int("b", 0, 2)
    return b if a == "one" else -b
"""

PRUNED = """
import optuna
def objective(trial):
    height = trial.suggest_float("height", 0, 1)
    for step in range(8):
        trial.report(height, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return height
"""


def write(folder: Path, text: str, name: str = "it.py") -> Path:
    """Return the file with `text`."""
    path = folder / name
    path.write_text(text)
    return path
