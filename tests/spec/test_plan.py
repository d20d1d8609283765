import re
from typing import Any

import pytest

from shoal.core.errors import PlanError
from shoal.spec.plan import Batch, Mesh, Plan


def test_shares_are_equal_unless_given() -> None:
    assert Plan(mesh=Mesh(replicate=4)).shares == (0.25,) * 4
    assert Plan(mesh=Mesh(replicate=2), batch=Batch(shares=(0.3, 0.7))).shares == (0.3, 0.7)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"shares": (0.25, 0.25, 0.1, 0.3)}, "shares 0.25,0.25,0.1,0.3 sum to 0.9. They must sum to 1."),
        ({"shares": (0.5, 0.5, 0.0)}, "shares 0.5,0.5,0: each share must be more than 0."),
        ({"shares": (1.5, -0.5)}, "each share must be more than 0."),
        ({"shares": (float("nan"), 1.0)}, "each share must be more than 0."),
        ({"micro_batch": 0}, "micro_batch=0: a micro-batch has at least 1 sample."),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=re.escape(sentence)):
        Batch(**fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"precision": "fp23"}, "precision='fp23' is none. Did you mean 'fp32'?"),
        ({"timeout_s": 0.0}, "timeout_s=0: a timeout must be more than 0."),
        ({"batch": Batch(shares=(0.5, 0.5))}, "2 shares for 1 workers. Give one share to each worker."),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=re.escape(sentence)):
        Plan(**fields)


def test_a_mesh_has_a_worker() -> None:
    with pytest.raises(PlanError, match="a mesh has at least 1 worker"):
        Mesh(replicate=0)


def test_thirds_sum_to_one_closely_enough() -> None:
    assert Batch(shares=(1 / 3, 1 / 3, 1 / 3)).shares == (1 / 3, 1 / 3, 1 / 3)
