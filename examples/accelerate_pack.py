"""A pack as the loader of an Accelerate script: every worker gets its part of each global batch, each sample once.

torchrun --nproc-per-node 2 examples/accelerate_pack.py digits.pack
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import network, train_set
from torch.optim import AdamW

import shoal

BATCH_SIZE, EPOCHS = 64, 1


def write_pack(path: Path) -> None:
    samples = (train_set[number] for number in range(len(train_set)))
    shoal.pack(({"image": image.numpy(), "label": int(label)} for image, label in samples), path)


def main(path: Path) -> list[float]:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # without cpu=True, each process would be alone
    with accelerator.main_process_first():
        if not path.exists():
            write_pack(path)
    set_seed(0)
    model = network()
    optimizer = AdamW(model.parameters(), lr=2e-3)
    workers = accelerator.num_processes
    # Not given to `prepare`, which leaves what is no DataLoader as it is: the loader itself is told who it loads for.
    loader = shoal.Loader(
        path,
        batch_size=BATCH_SIZE,  # of all workers together
        shares=[1 / workers] * workers,
        index=accelerator.process_index,
        device=accelerator.device,
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            # Accelerate takes the mean over workers. A part counts by its samples: the last, partial batch has parts
            # of different size, and the mean of their means would not be the mean of the batch.
            *_, all_samples = loader.given()
            part = F.cross_entropy(model(batch["image"]), batch["label"], reduction="sum") / all_samples
            accelerator.backward(part * workers)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(part.detach(), reduction="sum").item())
    accelerator.print(f"{len(losses)} steps, the last with a loss of {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "digits.pack"))
