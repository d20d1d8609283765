"""Which errors of the engine mean that another worker is gone."""

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


def is_peer_failure(error: BaseException) -> bool:
    """Return whether `error` is the echo of another worker's failure rather than a failure of this one."""
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _WORDS)
