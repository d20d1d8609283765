"""The digits of examples/digits.py as an ordinary LightningModule, trained under a shoal plan.

python examples/lightning_digits.py --workers 2 --zero 3
torchrun --nproc-per-node 2 examples/lightning_digits.py --workers 2
"""

import argparse

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from digits import Batch, network, test_set, train_set
from torch import Tensor
from torch.utils.data import DataLoader

from shoal import Mesh, Plan
from shoal.lightning import ShoalStrategy


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, _: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        accuracy = (self(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", accuracy, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0, choices=range(4))
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    pl.seed_everything(0)
    workers, zero = arguments.workers, arguments.zero
    mesh = Mesh(shard=workers) if zero else Mesh(replicate=workers)
    trainer = pl.Trainer(
        strategy=ShoalStrategy(Plan(mesh=mesh, zero=zero)),
        devices=workers,
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    # batch_size is that of all workers together: 1 or 2 of them train on the same batches.
    trainer.fit(Digits(), DataLoader(train_set, batch_size=64, shuffle=True), DataLoader(test_set, batch_size=360))
    metrics = trainer.callback_metrics
    if trainer.is_global_zero:
        print(f"{trainer.world_size} workers: loss {metrics['loss']:.6f}, accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
