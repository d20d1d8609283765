"""A small vision transformer of timm on images made up on the spot: which way do the stripes run?

pip install 'shoal[timm]'; shoal train examples/timm_images.py --workers 2
"""

from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import shoal

SIZE, WAYS, STEPS = 32, 4, 60


class Stripes(Dataset[tuple[Tensor, int]]):
    """Stripes in one of four directions, under noise. Image i is always the same."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        way = index % WAYS
        angle = torch.tensor(torch.pi * way / WAYS)
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        wave = torch.sin(x * angle.cos() + y * angle.sin() + 6.3 * torch.rand((1,), generator=generator))
        return wave.expand(3, -1, -1) + torch.randn(3, SIZE, SIZE, generator=generator), way


def model() -> Any:
    return timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        img_size=SIZE,
        patch_size=8,
        embed_dim=48,
        depth=4,
        num_heads=4,
        num_classes=WAYS,
    )


job = shoal.Job(
    model=model,
    loss=lambda output, batch: F.cross_entropy(output, batch[1]),
    metrics={"accuracy": lambda output, batch: (output.argmax(1) == batch[1]).float().mean()},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
    data=DataLoader(Stripes(512), batch_size=32, shuffle=True),  # taken apart: 32 is the global batch size
    eval_data=DataLoader(Stripes(64, first=512), batch_size=64),
    steps=STEPS,
)

if __name__ == "__main__":
    shoal.train(job)
