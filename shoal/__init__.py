"""shoal takes an ordinary PyTorch model from one process to many machines, and trains the same model on all of them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.api import fit as fit
    from shoal.api import plan as plan
    from shoal.api import start as start
    from shoal.api import train as train
    from shoal.api import verify as verify
    from shoal.core.errors import ShoalError as ShoalError
    from shoal.core.errors import Stopped as Stopped
    from shoal.data.loader import Loader as Loader
    from shoal.data.loading.crops import ImageOptions as ImageOptions
    from shoal.data.pack.writer import pack as pack
    from shoal.data.view import View as View
    from shoal.fault.checkpoint.weights import export as export
    from shoal.planner.memory.fit import Estimate as Estimate
    from shoal.planner.search.ranking import Ranking as Ranking
    from shoal.report.summary import Summary as Summary
    from shoal.spec.cluster import Cluster as Cluster
    from shoal.spec.cluster import Node as Node
    from shoal.spec.device import Device as Device
    from shoal.spec.device import Link as Link
    from shoal.spec.job import Job as Job
    from shoal.spec.plan import Batch as Batch
    from shoal.spec.plan import Checkpoints as Checkpoints
    from shoal.spec.plan import Loading as Loading
    from shoal.spec.plan import Mesh as Mesh
    from shoal.spec.plan import Plan as Plan
    from shoal.spec.program import Program as Program
    from shoal.spec.sync import Sync as Sync
    from shoal.tasks.map import map as map  # noqa: A004  # it is what it is
    from shoal.training.program import ProgramRun as ProgramRun
    from shoal.training.run import Run as Run
    from shoal.training.verify import Verdict as Verdict

__version__ = "0.1.0"

# Where each public name lives. It is imported when first used: `import shoal` alone takes no torch with it.
_HOMES = {
    "Batch": "shoal.spec.plan",
    "Checkpoints": "shoal.spec.plan",
    "Cluster": "shoal.spec.cluster",
    "Device": "shoal.spec.device",
    "Estimate": "shoal.planner.memory.fit",
    "ImageOptions": "shoal.data.loading.crops",
    "Job": "shoal.spec.job",
    "Link": "shoal.spec.device",
    "Loader": "shoal.data.loader",
    "Loading": "shoal.spec.plan",
    "Mesh": "shoal.spec.plan",
    "Node": "shoal.spec.cluster",
    "Plan": "shoal.spec.plan",
    "Program": "shoal.spec.program",
    "ProgramRun": "shoal.training.program",
    "Ranking": "shoal.planner.search.ranking",
    "Run": "shoal.training.run",
    "ShoalError": "shoal.core.errors",
    "Stopped": "shoal.core.errors",
    "Summary": "shoal.report.summary",
    "Sync": "shoal.spec.sync",
    "Verdict": "shoal.training.verify",
    "View": "shoal.data.view",
    "export": "shoal.fault.checkpoint.weights",
    "fit": "shoal.api",
    "map": "shoal.tasks.map",
    "pack": "shoal.data.pack.writer",
    "plan": "shoal.api",
    "start": "shoal.api",
    "train": "shoal.api",
    "verify": "shoal.api",
}

__all__ = [
    "Batch",
    "Checkpoints",
    "Cluster",
    "Device",
    "Estimate",
    "ImageOptions",
    "Job",
    "Link",
    "Loader",
    "Loading",
    "Mesh",
    "Node",
    "Plan",
    "Program",
    "ProgramRun",
    "Ranking",
    "Run",
    "ShoalError",
    "Stopped",
    "Summary",
    "Sync",
    "Verdict",
    "View",
    "export",
    "fit",
    "map",
    "pack",
    "plan",
    "start",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
