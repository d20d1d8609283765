"""What sync needs of torch that torch does not promise; tests/sync/test_direct.py says what broke when it moves."""

import torch


def packs_saved_tensors() -> bool:
    """Return whether hooks pack what is saved for backward now, as inside a block that will be computed again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
