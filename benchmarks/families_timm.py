"""Models of timm, also beside a torch that torchvision's compiled operators were not made for.

timm imports torchvision, and uses its Python alone. torchvision's wheel on PyPI is compiled for CUDA: beside a torch
for processors its operators cannot be loaded, and then importing it fails because their names are unknown. So they are
declared, as names without code; what would call one fails with torch's own error.

Where such a torchvision were among the other packages, transformers would fail to import it too. So `make setup` puts
both into a folder of their own, .venv/timm, that only those processes look into which declare the operators.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

_DECLARED = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def timm_model(name: str, **options: Any) -> nn.Module:
    """Return the model that timm builds by `name`, without weights from anywhere."""
    declare_operators()
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, **options)
    return model.train()


def timm_folder() -> Path | None:
    """Return the folder that timm is to be imported from; None where it is not installed."""
    found = importlib.util.find_spec("timm")
    if found is not None and found.origin is not None:
        return Path(found.origin).parents[1]
    apart = Path(sys.prefix) / "timm"
    return apart if (apart / "timm").is_dir() else None


def declare_operators() -> None:
    """Declare torchvision's operators where they cannot be loaded, so that its Python can be imported."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        torch.ops.load_library(Path(found.origin).parent / "_C.so")  # type: ignore[no-untyped-call]
    except OSError:
        for operator, schema in _OPERATORS.items():
            _DECLARED.define(operator + schema)  # type: ignore[no-untyped-call]
