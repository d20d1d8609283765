"""From a job to an estimate of what it needs: the job is traced, the device looked up, the rest is arithmetic."""

import dataclasses
import functools

from shoal.core.errors import ConfigError
from shoal.core.host import memory_bytes
from shoal.planner.catalog import read_device
from shoal.planner.machine import find_device
from shoal.planner.memory.fit import Estimate, estimate_fit
from shoal.profile.trace import trace
from shoal.spec.device import Device
from shoal.spec.job import Job
from shoal.spec.profile import Profile
from shoal.training.host import Say, measured_host, probed_host


def fit_job(
    job: Job,
    *,
    device: str | None = None,
    micro_batch: int | None = None,
    precision: str = "fp32",
    say: Say = lambda _: None,
) -> Estimate:
    """Return whether `job` fits one `device` of the catalog, or this machine's, and what would make it fit.

    `micro_batch` is what one forward takes; without it, the whole batch. Of a larger batch it is accumulated; where it
    is larger itself, it is the batch. `say` is told what is being done.
    """
    size = job.batch_size if micro_batch is None else micro_batch
    if size < 1:
        raise ConfigError(f"micro_batch={size}: a micro-batch has at least 1 sample.")
    found, gpu = _find_device(device, say=say)

    @functools.cache
    def profile_in(wanted: str) -> Profile:
        say(f"tracing the model in {wanted}")
        return trace(job, micro_batch=size, precision=wanted, gpu=gpu)

    return estimate_fit(
        profile_in,
        found,
        title=found.title or device or "this machine",
        precision=precision,
        micro_batch=size,
        batch_size=max(job.batch_size, size),
        gpu=gpu,
    )


def _find_device(name: str | None, *, say: Say) -> tuple[Device, bool]:
    """Return the device, and whether it is a GPU; of a processor, the memory is this host's."""
    if name is not None:
        device = read_device(name)
        if device.memory_bytes:
            return device, True
        return dataclasses.replace(device, memory_bytes=memory_bytes()), False
    say("measuring this machine")
    host = probed_host(None, say=say) or measured_host()
    device = find_device(host, host.nodes[0])
    if host.nodes[0].devices:
        return device, True
    return dataclasses.replace(device, memory_bytes=memory_bytes()), False
