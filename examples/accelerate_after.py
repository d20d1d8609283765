"""The loop of examples/accelerate_before.py on shoal; docs/accelerate.md goes through it line by line.

torchrun --nproc-per-node 2 examples/accelerate_after.py
"""

import torch.nn.functional as F
from digits import network, train_set
from torch.optim import AdamW
from torch.utils.data import Subset

import shoal

BATCH_SIZE, EPOCHS = 64, 1

job = shoal.Job(
    model=network,
    loss=lambda logits, batch: F.cross_entropy(logits, batch[1]),
    optimizer=lambda parameters: AdamW(parameters, lr=2e-3),
    # shoal would train on the last, partial batch, too; left out here so that both scripts have the same steps.
    data=Subset(train_set, range(len(train_set) // BATCH_SIZE * BATCH_SIZE)),
    batch_size=BATCH_SIZE,  # of all workers together
    epochs=EPOCHS,
    clip_norm=1.0,
    shuffle=False,
    seed=0,
)


def main() -> list[float]:
    with shoal.start(job) as run:
        losses = [run.step(batch) for batch in run.batches()]
        run.say(f"{len(losses)} steps, the last with a loss of {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
