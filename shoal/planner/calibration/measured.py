"""Measured steps to calibrate from: a CSV of Megatron runs with these columns, in any order.

    gpus global_batch micro_batch width heads layers sequence tensor data pipeline step_ms

`step_ms` is the time of one iteration with full recompute, mixed precision, 1F1B and no ZeRO. A column `params_billion`
names the model, for reading; other columns are an error, so that a misspelt name is not passed over.
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import ConfigError, did_you_mean
from shoal.planner.calibration.megatron import fuses_softmax, gpt_plan, gpt_profile
from shoal.spec.plan import Plan
from shoal.spec.profile import Profile

COLUMNS = (
    "gpus", "global_batch", "micro_batch", "width", "heads", "layers", "sequence", "tensor", "data", "pipeline",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured step, with what the planner needs to predict it."""

    file: str
    line: int
    profile: Profile
    plan: Plan
    batch_size: int
    step_s: float
    model: str
    """Rows of one model on as many devices with the same global batch are ways to do the same: they can be ranked."""


def read_rows(path: Path) -> list[Measured]:
    """Return the rows of the CSV at `path`."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            _check_header(path, list(reader.fieldnames or []))
            rows = [_row(path, reader.line_num, record) for record in reader]
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a CSV: {error}.") from None
    if not rows:
        raise ConfigError(f"{path} has no rows below its header: there is nothing to calibrate from.")
    return rows


def _check_header(path: Path, names: list[str]) -> None:
    needed, known = [*COLUMNS, "step_ms"], [*COLUMNS, "step_ms", "params_billion"]
    for name in needed:
        if name not in names:
            raise ConfigError(f"{path} line 1 lacks the column {name!r}. It needs: {','.join(needed)}.")
    for name in names:
        if name not in known:
            raise ConfigError(f"{path} line 1 has an unknown column {name!r}.{did_you_mean(name, known)}")


def _row(path: Path, line: int, record: dict[str, str]) -> Measured:
    where = f"{path} line {line}"
    if None in record or None in record.values():
        raise ConfigError(f"{where} does not have as many values as the header has columns.")
    number = {name: _whole(where, name, record[name]) for name in COLUMNS}
    step_ms = _positive(where, "step_ms", record["step_ms"])
    _check_shape(where, number)
    width, heads, sequence, layers = (number[name] for name in ("width", "heads", "sequence", "layers"))
    tensor, micro_batch = number["tensor"], number["micro_batch"]
    fused = fuses_softmax(heads=heads, tensor=tensor, micro_batch=micro_batch)
    billions = record.get("params_billion")
    name = f"{billions}B" if billions else f"{layers} x {width}"
    return Measured(
        file=str(path),
        line=line,
        profile=gpt_profile(
            width=width, heads=heads, layers=layers, sequence=sequence, fused_softmax=fused, cut_by_count=True
        ),
        plan=gpt_plan(tensor=tensor, data=number["data"], pipeline=number["pipeline"], micro_batch=micro_batch),
        batch_size=number["global_batch"],
        step_s=step_ms / 1e3,
        model=f"{name} on {number['gpus']} devices, batch {number['global_batch']}",
    )


def _check_shape(where: str, number: dict[str, int]) -> None:
    tensor, data, pipeline, gpus = (number[name] for name in ("tensor", "data", "pipeline", "gpus"))
    if tensor * data * pipeline != gpus:
        raise ConfigError(
            f"{where}: tensor={tensor} x data={data} x pipeline={pipeline} is {tensor * data * pipeline}, "
            f"not gpus={gpus}."
        )
    heads, width, layers = number["heads"], number["width"], number["layers"]
    if width % heads or heads % tensor:
        raise ConfigError(f"{where}: width={width} must divide by heads={heads}, and heads by tensor={tensor}.")
    if pipeline > layers:
        raise ConfigError(f"{where}: pipeline={pipeline} with layers={layers}. A stage has at least one layer.")
    if number["global_batch"] % (data * number["micro_batch"]):
        raise ConfigError(
            f"{where}: global_batch={number['global_batch']} does not divide by "
            f"data={data} x micro_batch={number['micro_batch']}."
        )


def _whole(where: str, name: str, text: str) -> int:
    value = _positive(where, name, text)
    if value != int(value):
        raise ConfigError(f"{where}: {name}={text.strip()} must be a whole number.")
    return int(value)


def _positive(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{where}: {name}={text.strip()!r} is no number.") from None
    if not 0 < value < math.inf:
        raise ConfigError(f"{where}: {name}={text.strip()} must be more than 0.")
    return value
