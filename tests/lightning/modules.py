"""What workers of the pool run in the tests of Lightning: as if torchrun had started them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from shoal.comm.rank import Rank
from shoal.core.errors import ShoalError
from shoal.spec.plan import Plan
from tests.support.torchrun import as_torchrun

NUM_SAMPLES, BATCH = 45, 8  # the last batch of an epoch has 5 samples


class Numbers(Dataset[tuple[Tensor, Tensor, int]]):
    """Samples (x, y, their number)."""

    def __init__(self, count: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, 6, generator=generator)
        self.y = torch.tanh(self.x.sum(1, keepdim=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


def network(*, hard: bool = False) -> nn.Sequential:
    """Blocks to shard, and a weight that two layers share; `hard`: with batch norm and dropout.

    A bias before batch norm has no gradient but rounding errors, which AdamW would make large.
    """
    torch.manual_seed(11)
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
    first, second = nn.Linear(16, 6), nn.Linear(16, 6)
    second.weight = first.weight
    more = [nn.BatchNorm1d(16), nn.Dropout(0.3)] if hard else []
    begin = nn.Linear(6, 16, bias=not hard)
    return nn.Sequential(begin, *more, *blocks, first, nn.GELU(), nn.Linear(6, 16), second, nn.Linear(6, 1))


def module_of(*, hard: bool = False) -> Any:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(hard=hard)
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.losses: list[float] = []
            self.seen: list[list[int]] = []

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.net(x) * self.scale
            return output

        def training_step(self, batch: Any, _: int) -> Tensor:
            self.seen.append(batch[2].tolist())
            loss = F.mse_loss(self(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.losses.append(float(self.trainer.callback_metrics["loss"]))

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

        def predict_step(self, batch: Any, _: int) -> list[int]:
            self(batch[0])
            numbers: list[int] = batch[2].tolist()
            return numbers

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]

    return Module()


@contextmanager
def as_lightning(rank: Rank) -> Iterator[None]:
    """Be as torchrun starts a worker, and leave the group at the end: the pool's processes go on."""
    with as_torchrun(rank):
        try:
            yield
        finally:
            from shoal.lightning.strategy import leave

            leave()


def loader(*, batch_size: int = BATCH, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=batch_size, **options)


def fit(
    rank: Rank,
    *,
    plan: Plan | str | None,
    folder: str = ".",
    hard: bool = False,
    loading: Mapping[str, Any] | None = None,
    load: Callable[[], Any] | None = None,
    save_every: int = 0,
    ckpt_path: str | None = None,
    strategy: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> dict[str, Any]:
    """Train under `plan` (None: Lightning alone), and return what came of it on this worker."""
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    from shoal.lightning import ShoalStrategy

    with as_lightning(rank):
        kept = ModelCheckpoint(dirpath=folder, every_n_train_steps=save_every, save_top_k=-1, filename="{step}")
        options: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 0.5, **trainer}
        made = pl.Trainer(
            accelerator="cpu",
            devices=rank.workers,
            strategy="auto" if plan is None else ShoalStrategy(plan, **(strategy or {})),
            callbacks=[kept] if save_every else None,
            enable_checkpointing=bool(save_every),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **options,
        )
        module = module_of(hard=hard)
        train = load() if load is not None else loader(**(loading or {}))
        made.fit(module, train, loader(batch_size=11), ckpt_path=ckpt_path)
        state = made.strategy.lightning_module_state_dict()
        tested = made.validate(module, loader(batch_size=11), verbose=False)
        val_loss = float(made.callback_metrics["val_loss"])
        predicted = made.predict(module, loader(batch_size=11)) or []
        return {
            "losses": module.losses,
            "seen": module.seen,
            "state": {name: value.clone() for name, value in state.items()},
            "val_loss": val_loss,
            "validated": tested[0]["val_loss"],
            "predicted": [number for batch in predicted for number in batch],
            "checkpoints": sorted(str(path) for path in Path(folder).glob("step=*.ckpt")) if save_every else [],
        }


def refusal(rank: Rank, **arguments: Any) -> str:
    """Return the sentence that `fit` refuses with."""
    try:
        fit(rank, **arguments)
    except ShoalError as error:
        return str(error)
    return ""
