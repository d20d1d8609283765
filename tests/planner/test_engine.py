"""Which codecs go with a plan: what `auto` is chosen from, and what is refused if it is named."""

import dataclasses
from typing import Any

import pytest

from shoal.core.errors import PlanError
from shoal.planner.engine import codecs_for, why_no_codec
from shoal.planner.search.validate import check_sync
from shoal.spec.plan import Mesh, Plan
from shoal.spec.sync import CODECS, Sync

PLANS: list[dict[str, Any]] = [
    {"mesh": Mesh(replicate=4)},
    {"mesh": Mesh(replicate=4), "sync": Sync(mode="local", local_steps=4)},
    {"mesh": Mesh(replicate=4), "sync": Sync(mode="deadline")},
    {"mesh": Mesh(replicate=4), "sync": Sync(mode="server")},
    {"mesh": Mesh(shard=4), "zero": 1},
    {"mesh": Mesh(shard=2, tensor=2), "zero": 3},
    {"mesh": Mesh(shard=2, pipeline=2), "zero": 2},
    {"mesh": Mesh(shard=2, replicate=2), "zero": 2},
    {"mesh": Mesh(replicate=2, tensor=2)},
    {"mesh": Mesh(replicate=2, pipeline=2)},
    {"mesh": Mesh(shard=2), "zero": 2, "engine": "deepspeed"},
]


def is_refused(fields: dict[str, Any], codec: str) -> bool:
    sync = dataclasses.replace(fields.get("sync", Sync()), codec=codec)
    try:
        check_sync(Plan(**{**fields, "sync": sync}))
    except PlanError:
        return True
    return False


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_auto_goes_with_every_plan_and_is_chosen_from_what_would_not_be_refused(fields: dict[str, Any]) -> None:
    plan = Plan(**fields)
    named = [name for name in CODECS if name not in ("none", "auto")]
    assert codecs_for(plan) == tuple(name for name in named if not is_refused(fields, name))
    assert bool(why_no_codec(plan)) == (codecs_for(plan) == ())
    assert not is_refused(fields, "auto")
