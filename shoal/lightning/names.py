"""Lightning by whichever of its names is installed, and the three private things of it that a strategy needs.

It is published twice, as `lightning` (with `lightning.pytorch`) and as `pytorch_lightning`: the same code, but two
copies of each class, and a Trainer of one takes no strategy of the other. So the copy that the script has imported
already is taken; else the one that is there.
"""

import importlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ConfigError

_COPIES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))

if TYPE_CHECKING:
    from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.plugins.precision import Precision
    from pytorch_lightning.strategies import ParallelStrategy
else:

    def _names() -> tuple[str, str]:
        for names in _COPIES:
            if names[0] in sys.modules:
                return names
        for names in _COPIES:
            if find_spec(names[0].partition(".")[0]) is not None:
                return names
        raise ConfigError("shoal.lightning needs Lightning. Install it: pip install 'shoal[lightning]'.")

    _PYTORCH, _FABRIC = _names()
    LightningModule = importlib.import_module(_PYTORCH).LightningModule
    Trainer = importlib.import_module(_PYTORCH).Trainer
    Precision = importlib.import_module(f"{_PYTORCH}.plugins.precision").Precision
    ParallelStrategy = importlib.import_module(f"{_PYTORCH}.strategies").ParallelStrategy
    ClusterEnvironment = importlib.import_module(f"{_FABRIC}.plugins.environments").ClusterEnvironment

__all__ = [
    "ClusterEnvironment",
    "LightningModule",
    "ParallelStrategy",
    "Precision",
    "Trainer",
    "leave_samplers",
    "script_launcher",
    "set_rank",
]


def script_launcher(environment: ClusterEnvironment, *, workers: int, nodes: int) -> Any:
    """Return what starts the script that calls `fit` once more for each other worker of this node."""
    home = importlib.import_module(f"{ParallelStrategy.__module__.rpartition('.')[0]}.launchers.subprocess_script")
    return home._SubprocessScriptLauncher(environment, workers, nodes)


def leave_samplers(trainer: Trainer) -> None:
    """Have the trainer put no DistributedSampler into loaders: it would shuffle, pad, and take batch_size a worker."""
    connector: Any = trainer._accelerator_connector
    assert hasattr(connector, "use_distributed_sampler")
    connector.use_distributed_sampler = False


def set_rank(index: int) -> None:
    """Tell Lightning which worker this is: only the first one writes, logs and warns."""
    home = importlib.import_module(f"{ParallelStrategy.__module__.rpartition('.strategies.')[0]}.utilities.rank_zero")
    home.rank_zero_only.rank = index
    from lightning_utilities.core.rank_zero import rank_zero_only

    rank_zero_only.rank = index  # type: ignore[attr-defined]
