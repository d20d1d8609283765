"""What DeepSpeed cannot do here is refused when the plan is built, with what to write instead."""

import re
from typing import Any

import pytest

from shoal.core.errors import PlanError
from shoal.spec.on_loss import OnLoss
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.sync import Sync


def test_torch_runs_a_plan_that_names_no_engine() -> None:
    assert Plan().engine == "torch"
    assert Plan().goes_on


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_deepspeed_runs_every_stage_of_zero(zero: int) -> None:
    plan = Plan(engine="deepspeed", zero=zero, mesh=Mesh(shard=2), offload=True, batch=Batch(shares=(0.25, 0.75)))
    assert not plan.goes_on
    assert Plan(engine="deepspeed", zero=zero).workers == 1  # one GPU and the host's memory


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"engine": "deepsped"}, "engine='deepsped' is none. Did you mean 'deepspeed'?"),
        ({"engine": "torch", "offload": True}, "offload=true with engine='torch'"),
        ({"zero": 0, "mesh": Mesh()}, "with zero=0: DeepSpeed is here for ZeRO. Use zero=1, 2 or 3 with mesh.shard"),
        (
            {"mesh": Mesh(shard=2, tensor=2)},
            "mesh.tensor=2: it shards here, and divides nothing else. Use mesh.tensor=1",
        ),
        ({"mesh": Mesh(shard=2, pipeline=2)}, "mesh.pipeline=2: it shards here"),
        ({"mesh": Mesh(shard=2, replicate=2)}, "Use mesh.shard=4 with mesh.replicate=1, or engine='torch'."),
        ({"sync": Sync(codec="int8")}, "sync.codec='int8': it sends gradients as they are. Use sync.codec='none'"),
        ({"sync": Sync(mode="local")}, "sync.mode='local': its workers meet in every step."),
        ({"sync": Sync(way="ring")}, "sync.way='ring': it has its own collectives. Use sync.way='engine'"),
        ({"compile": True}, "compile=true: its hooks around the layers are not compiled. Use compile=false"),
        ({"on_loss": OnLoss(snapshot="5")}, "on_loss.snapshot='5': its workers cannot go on without one that is lost."),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=re.escape(sentence)):
        Plan(**{"engine": "deepspeed", "zero": 2, "mesh": Mesh(shard=2), **fields})
