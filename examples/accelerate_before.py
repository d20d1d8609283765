"""A training loop as people write it for Accelerate; examples/accelerate_after.py is the same loop on shoal.

torchrun --nproc-per-node 2 examples/accelerate_before.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import network, train_set
from torch.optim import AdamW
from torch.utils.data import DataLoader

BATCH_SIZE, EPOCHS = 64, 1


def main() -> list[float]:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # without cpu=True, each process would be alone
    set_seed(0)
    model = network()
    optimizer = AdamW(model.parameters(), lr=2e-3)
    # A DataLoader's batch is that of one process; and the last, partial batch would be filled up with other samples.
    loader = DataLoader(train_set, batch_size=BATCH_SIZE // accelerator.num_processes, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.print(f"{len(losses)} steps, the last with a loss of {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
