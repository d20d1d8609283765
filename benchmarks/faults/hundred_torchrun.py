"""The job of hundred.py as people write it for torchrun: DDP, and a checkpoint by torch.save every 20 steps.

    torchrun ... hundred_torchrun.py FOLDER STEPS KILLS

KILLS is a list of [step, worker]: there that worker kills itself, once, and FOLDER/killed-STEP tells when. Worker 0
writes down when each step was done.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.faults import hundred_model

CHECKPOINT_STEPS = 20


class Samples(Dataset[dict[str, torch.Tensor]]):
    """All samples, in memory; made once, and kept in a file."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "samples.npz") as arrays:
            self.x, self.y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def kill_if_due(folder: Path, step: int, kills: list[list[int]]) -> None:
    """End this worker as the kernel does, if this is its step and it has not been before."""
    note = folder / f"killed-{step}"
    if [step, dist.get_rank()] in kills and not note.exists():
        note.write_text(json.dumps({"time": time.time(), "step": step}))
        os.kill(os.getpid(), signal.SIGKILL)


def main(path: str, steps: str, kills: str) -> None:
    """Train to the end, from the last checkpoint if there is one."""
    folder, killed = Path(path), json.loads(kills)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = hundred_model.build()
    optimizer = hundred_model.optimizer(model.parameters())
    step, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    replica = DistributedDataParallel(model)
    data = Samples(folder)
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=hundred_model.BATCH // dist.get_world_size(), sampler=sampler)
    log = os.open(folder / "done.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    while step < int(steps):
        sampler.set_epoch(step // len(loader))
        for batch in loader:
            step += 1
            loss = hundred_model.loss(replica(batch["x"]), batch)
            time.sleep(hundred_model.STEP_S)
            kill_if_due(folder, step, killed)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if dist.get_rank() == 0:
                os.write(log, json.dumps({"step": step, "time": time.time()}).encode() + b"\n")
                if step % CHECKPOINT_STEPS == 0:
                    draft = checkpoint.with_suffix(".draft")
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, draft)
                    draft.rename(checkpoint)
            if step >= int(steps):
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
