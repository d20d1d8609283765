"""GPT-2 124M on random tokens, as a job: what benchmarks/gpu/throughput.py trains."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

LENGTH, VOCABULARY = 1024, 50304
LAYERS, WIDTH, HEADS = 12, 768, 12
BATCH = 32


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes out of the block for `x`."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))  # type: ignore[no-any-return]


class GPT2(nn.Module):
    """GPT-2, its embedding tied to its head."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each token."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows of a stream of random tokens."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(50257, (count * LENGTH + 1,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.tokens[index * LENGTH : (index + 1) * LENGTH + 1]
        return {"x": window[:-1], "y": window[1:]}


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, in one kernel where there is a GPU."""
    return torch.optim.AdamW(parameters, lr=6e-4, betas=(0.9, 0.95), fused=torch.cuda.is_available())


job = shoal.Job(
    model=GPT2,
    inputs=lambda batch: batch["x"],
    loss=loss,
    optimizer=optimizer,
    data=Windows(4096),
    batch_size=BATCH,
    steps=100,
    weight=lambda batch: batch["y"].numel(),
    unit="tokens",
)
