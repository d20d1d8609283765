"""How the writing of a checkpoint ended."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Written:
    """The same on every worker, but for what it took."""

    step: int
    stall_s: float
    """How long the loop waited for it: for the one before, and for the copy to memory."""
    write_s: float
    """From then on until it was committed."""
    num_bytes: int
    """What this worker wrote."""
    local_s: float | None = None
    """How long it took to write it to the node's storage, if that was done."""
    error: str = ""
    """Why it is not there, if it is not."""
    note: str = ""
    """What else there is to say."""
