"""The loggers there are, by the names that people give them. Their libraries are imported when one is started."""

import dataclasses
from importlib.util import find_spec
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.spec.plan import Plan
from shoal.spec.record import JobRecord, RunRecord
from shoal.training.loggers.logger import Logger
from shoal.training.loggers.mlflow import MLflow
from shoal.training.loggers.tensorboard import TensorBoard
from shoal.training.loggers.wandb import WandB

LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check_loggers(names: tuple[str, ...]) -> None:
    """Raise ConfigError if one of the loggers is not installed, or cannot work as things are set."""
    for name in names:
        if find_spec({"tensorboard": "tensorboardX"}.get(name, name)) is None:
            raise ConfigError(f"log {name!r}: {name} is not installed. Install it: pip install 'shoal[{name}]'")
        LOGGERS[name].check()


def loggers_of(folder: RunFolder | None) -> tuple[str, ...]:
    """Return the loggers of the run in `folder`; of a new run if there is none."""
    if folder is None or not folder.job_toml.is_file():
        return JobRecord.log
    return read_toml(JobRecord, folder.job_toml).log


def config_of(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Return the settings of the run that its folder has: its job, its plan, and its circumstances."""
    tables: dict[str, tuple[Any, Any]] = {
        "job": (JobRecord, folder.job_toml),
        "plan": (Plan, folder.plan_toml),
        "run": (RunRecord, folder.run_toml),
    }
    return {name: dataclasses.asdict(read_toml(cls, path)) for name, (cls, path) in tables.items() if path.is_file()}
