"""The private parts of torch's FSDP2 that sharding uses. When they move, tests/parallel/test_torch_private.py says."""

from torch.distributed.fsdp import FSDPModule

from shoal.comm.collectives import Waiting, timed

WAITS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
"""Where the stream that computes can come to stand for communication (torch 2.11 to 2.13)."""


def time_waits(module: FSDPModule, waiting: Waiting) -> None:
    """Let the stream's waits for the parameters and gradients of `module`'s own group run inside `waiting()`."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.12 has several
    for group in groups:
        for name in WAITS if group is not None else ():
            setattr(group, name, timed(getattr(group, name), waiting))
