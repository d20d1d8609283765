"""Which errors of the engine mean that another worker is gone.

1. Errors of torch's own classes for the network are.
2. Most of what Gloo says is a plain RuntimeError: it is one if it has the words, and C++ has raised it.
3. One that a `raise` statement of the job or of its libraries has raised is theirs, whatever its words: a dataset's
   server may refuse connections, too. Unless what it was raised from is the engine's.
"""

import dis
from pathlib import Path

import torch.distributed as dist

# What Gloo, NCCL and the store say when the other side has left (torch 2.11 to 2.13): they raise plain RuntimeError
# for most of it, so the words are all there is to go by.
_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "read timeout",
    "wait timeout",
    "socket timeout",
    "application timeout caused pair closure",
    "remote process exited",
    "failed to recv, got 0 bytes",
    "gloo connectfullmesh failed",
)
_RAISE = dis.opmap["RAISE_VARARGS"]
_ENGINES = (str(Path(dist.__file__).parent), str(Path(__file__).parents[1]))
"""Where Python, too, speaks for other workers: torch.distributed and shoal."""


def is_peer_failure(error: BaseException) -> bool:
    """Return whether `error` is the echo of another worker's failure rather than a failure of this one."""
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
        return True
    text = str(error).lower()
    if not isinstance(error, RuntimeError) or not any(words in text for words in _WORDS):
        return False
    if not _is_raised_by_others(error):
        return True
    inner = error.__cause__ or error.__context__
    return inner is not None and is_peer_failure(inner)


def _is_raised_by_others(error: BaseException) -> bool:
    """Return whether a `raise` statement outside of torch.distributed and shoal has raised `error`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    return code.co_code[trace.tb_lasti] == _RAISE and not code.co_filename.startswith(_ENGINES)
