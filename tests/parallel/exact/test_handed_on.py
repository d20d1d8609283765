"""A parameter that is handed to a layer stays one for dropout, whatever engines do with it on the way."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

from shoal.parallel.exact.handed_on import is_parameter


def test_what_a_parameter_has_been_computed_into_is_none() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    assert is_parameter(weight)
    assert not is_parameter(weight * 2)
    assert not is_parameter(weight[:2])
    assert not is_parameter(torch.ones(4, 3))


def test_fsdp_hands_it_on() -> None:
    other, weight = torch.ones(2, requires_grad=True) * 2, nn.Parameter(torch.ones(4, 3))
    group = type("Group", (), {})()
    handed: Any = RegisterPostBackwardFunction.apply(group, other, weight)  # type: ignore[no-untyped-call]
    assert not isinstance(handed[1], nn.Parameter)
    assert is_parameter(handed[1])
    assert not is_parameter(handed[0])
