"""The private part of transformers that tracing stands on. When it moves, tests/profile/test_config.py says so."""

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def unpacked_samples() -> Iterator[None]:
    """Take a sample for one sequence while tracing.

    Without an attention mask transformers looks at the positions for several sequences packed into one sample. It
    cannot look at fake tensors, and would write out a mask of length x length that a real run does not have.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "find_packed_sequence_indices"):
        yield
        return
    with mock.patch.object(masking, "find_packed_sequence_indices", return_value=None):
        yield
