"""A byte-level GPT on text that every machine has: the sources of Python's own standard library.

shoal train examples/gpt.py --workers 2
"""

import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

CONTEXT = 128
VOCABULARY = 256  # a token is a byte
STEPS = 120


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_up = nn.Linear(width, 4 * width, bias=False)
        self.feed_down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        fed: Tensor = self.feed_down(F.gelu(self.feed_up(self.feed_norm(x))))
        return x + fed

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class GPT(nn.Module):
    def __init__(self, layers: int = 6, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # smaller where a layer adds to the residual stream, as in GPT-2
                is_residual = name.endswith(("attention_out.weight", "feed_down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(self.norm(x))
        return logits


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows of CONTEXT bytes, and the same one byte later, side by side over a text."""

    def __init__(self, text: bytes) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.bytes[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return {"x": window[:-1], "y": window[1:]}


def python_sources() -> bytes:
    """Return the modules that lie directly in Python's standard library, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def warm_up_and_decay(step: int) -> float:
    """Return the factor of the learning rate: up over 20 steps, then down along a cosine to a tenth."""
    if step < 20:
        return (step + 1) / 20
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - 20) / (STEPS - 20)))


job = shoal.Job(
    model=GPT,
    inputs=lambda batch: batch["x"],
    loss=loss,
    weight=lambda batch: batch["y"].numel(),
    unit="tokens",
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-4, betas=(0.9, 0.95), fused=True),
    schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_decay),
    clip_norm=1.0,
    data=Windows(python_sources()),
    batch_size=8,
    steps=STEPS,
)

if __name__ == "__main__":
    shoal.train(job)
