"""From advice to a plan: the fields that change, set; and the flags of `shoal train` that do the same."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shoal.spec.plan import Plan

FLAGS = {
    "loading.threads": "--loader-threads",
    "loading.workers": "--loader-workers",
    "sync.codec": "--codec",
    "batch.shares": "--shares",
    "batch.micro_batch": "--micro-batch",
    "schedule": "--schedule",
    "checkpoint.every_steps": "--checkpoint-every",
}
"""The flag of each field that advice changes."""


def follow(plan: Plan, change: Mapping[str, object]) -> Plan:
    """Return `plan` with `change`, which names fields as a plan file does: {"batch.micro_batch": 8}.

    What the plan was predicted to cost is no more. Raises PlanError where the fields do not go together.
    """
    tables: dict[str, dict[str, Any]] = {}
    changed = ", ".join(f"{name} = {_word(value)}" for name, value in change.items())
    asked: dict[str, Any] = {"predicted": None, "why": (*plan.why, f"Changed as a report has advised: {changed}.")}
    for name, value in change.items():
        table, _, field = name.rpartition(".")
        (tables.setdefault(table, {}) if table else asked)[field] = value
    for table, values in tables.items():
        asked[table] = dataclasses.replace(getattr(plan, table), **values)
    return dataclasses.replace(plan, **asked)


def flags_of(change: Mapping[str, object]) -> str:
    """Return what to write behind `shoal train FILE`: '--micro-batch 8'."""
    return " ".join(f"{FLAGS[name]} {_word(value)}" for name, value in change.items())


def _word(value: object) -> str:
    return ",".join(f"{each:.6g}" for each in value) if isinstance(value, tuple) else str(value)
