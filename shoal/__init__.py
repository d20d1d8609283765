"""shoal takes an ordinary PyTorch model from one process to many machines, and trains the same model on all of them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.api import start as start
    from shoal.api import train as train
    from shoal.core.errors import ShoalError as ShoalError
    from shoal.report.summary import Summary as Summary
    from shoal.spec.job import Job as Job
    from shoal.spec.plan import Batch as Batch
    from shoal.spec.plan import Mesh as Mesh
    from shoal.spec.plan import Plan as Plan
    from shoal.training.run import Run as Run

__version__ = "0.1.0"

# Where each public name lives. It is imported when first used: `import shoal` alone takes no torch with it.
_HOMES = {
    "Batch": "shoal.spec.plan",
    "Job": "shoal.spec.job",
    "Mesh": "shoal.spec.plan",
    "Plan": "shoal.spec.plan",
    "Run": "shoal.training.run",
    "ShoalError": "shoal.core.errors",
    "Summary": "shoal.report.summary",
    "start": "shoal.api",
    "train": "shoal.api",
}

__all__ = ["Batch", "Job", "Mesh", "Plan", "Run", "ShoalError", "Summary", "start", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
