"""Importing DeepSpeed, only when a plan asks for it, so that it compiles nothing and is quiet."""

import importlib.util
import logging
import os
import sys
from typing import Any

import torch

from shoal.core.errors import ConfigError


def check_installed() -> None:
    """Raise ConfigError where DeepSpeed is not installed; without importing it, which takes seconds."""
    if "deepspeed" in sys.modules and sys.modules["deepspeed"] is not None:
        return
    if "deepspeed" in sys.modules or importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "engine='deepspeed' needs the package deepspeed, which is not installed. Install it: "
            "pip install 'shoal[deepspeed]'"
        )


def load_deepspeed(device: torch.device) -> Any:
    """Return the package `deepspeed`, set up for workers on `device`."""
    check_installed()
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at its import: else it looks for others, and warns
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed
