"""Which device this worker computes on."""

import os

import torch

from shoal.comm.rank import Rank
from shoal.core.host import THREADS, threads_per_worker


def pick_device(rank: Rank) -> torch.device:
    """Return this worker's GPU, shared in turn where workers outnumber them, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank.local_index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def set_threads(rank: Rank) -> None:
    """Give this worker its share of the node's cores, unless whoever started it has decided that for good."""
    if "OMP_NUM_THREADS" not in os.environ or os.environ.get(THREADS) == "shared":
        torch.set_num_threads(threads_per_worker(rank.local_workers))
