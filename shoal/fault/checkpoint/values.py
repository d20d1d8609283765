"""Python values as JSON and back: what schedules and optimizers keep beside tensors. Nothing is ever unpickled.

JSON has no tuples, no numbers as keys, no infinities and no tensors: these are written as {"!": kind, "of": content}.
"""

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal.core.errors import JobError

_LISTS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "deque": deque}
_DICTS: dict[str, Callable[[Any], Any]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_PLAIN: dict[str, Callable[[Any], Any]] = {"float": float, "bytes": base64.b64decode}


def to_json(value: Any, *, where: str) -> Any:
    """Return `value` as JSON can hold it; `where` says in an error whose value it was."""
    if isinstance(value, (np.floating, np.integer, np.bool_)):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list):
        return [to_json(item, where=where) for item in value]
    if isinstance(value, dict):
        return _dict_to_json(value, where)
    return _tagged(value, where)


def _tagged(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, float):
        return {"!": "float", "of": repr(value)}
    if isinstance(value, bytes):
        return {"!": "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {"!": "tensor", "of": value.detach().cpu().tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if type(value).__name__ in _LISTS:
        return {"!": type(value).__name__, "of": [to_json(item, where=where) for item in value]}
    raise JobError(f"{where} holds a {type(value).__name__}, which a checkpoint cannot keep: it keeps plain values.")


def _dict_to_json(value: dict[Any, Any], where: str) -> Any:
    if type(value) is dict and all(isinstance(key, str) and key != "!" for key in value):
        return {key: to_json(item, where=where) for key, item in value.items()}
    kind = type(value).__name__ if type(value).__name__ in _DICTS else "dict"
    return {"!": kind, "of": [[to_json(k, where=where), to_json(v, where=where)] for k, v in value.items()]}


def from_json(value: Any) -> Any:
    """Return what `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    return _untagged(value) if "!" in value else {key: from_json(item) for key, item in value.items()}


def _untagged(value: dict[str, Any]) -> Any:
    kind, content = value["!"], value["of"]
    if kind == "tensor":
        return torch.tensor(content, dtype=getattr(torch, value["dtype"]))
    if kind in _PLAIN:
        return _PLAIN[kind](content)
    if kind in _LISTS:
        return _LISTS[kind](from_json(item) for item in content)
    return _DICTS[kind]({from_json(k): from_json(v) for k, v in content})
