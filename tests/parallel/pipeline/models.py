"""Models to cut into pieces: how each is built, a batch for it, and its loss."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tests.support.jobs import GPT

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Model:
    """A model to cut: how it is built, a batch of a size, and its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any], Tensor]


class ViT(nn.Module):
    """A vision transformer with its class token and positions right on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, 32))
        self.positions = nn.Parameter(torch.randn(1, 5, 32))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(4))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) * self.scale
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


class BiasedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(x)) * bias
        return out


class Biased(nn.Module):
    """Gives every block what it makes of one table, right on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8))
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(BiasedBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        bias, x = torch.sin(self.table), self.stem(x)
        for block in self.blocks:
            x = block(x, bias)
        return x


class Residual(nn.Module):
    """A block of a ResNet, with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    wide = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), Residual(16), Residual(16))
    return nn.Sequential(stem, nn.Sequential(Residual(8), Residual(8)), wide, nn.Flatten(), nn.Linear(16 * 64, 10))


def hugging_face(family: str, head: str, **config: Any) -> nn.Module:
    """Return a small model of a family: hugging_face("GPT2", "LMHeadModel", n_layer=4)."""
    import transformers

    model: nn.Module = getattr(transformers, family + head)(getattr(transformers, family + "Config")(**config))
    return model


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 2}
    return hugging_face(
        "GPT2", "LMHeadModel", use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes
    )


def gpt2_with_cache() -> nn.Module:
    model: Any = gpt2()
    model.config.use_cache = True
    return cast(nn.Module, model)


def llama() -> nn.Module:
    return hugging_face("Llama", "ForCausalLM", vocab_size=64, num_key_value_heads=2, use_cache=False, **SIZES)


def bert() -> nn.Module:
    return hugging_face("Bert", "ForMaskedLM", vocab_size=64, **SIZES, **NO_DROPOUT)


def vit_of_hugging_face() -> nn.Module:
    return hugging_face("ViT", "ForImageClassification", image_size=16, patch_size=8, **SIZES, **NO_DROPOUT)


def t5(head: str) -> nn.Module:
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "num_layers": 4, "num_heads": 2, "d_kv": 16}
    return hugging_face("T5", head, dropout_rate=0.0, decoder_start_token_id=0, **sizes)


def tokens(size: int) -> Tensor:
    return torch.randint(0, 64, (size, 16))


def text(size: int) -> dict[str, Tensor]:
    ids = tokens(size)
    return {"input_ids": ids, "labels": ids}


def masked_text(size: int) -> dict[str, Tensor]:
    mask = torch.ones(size, 16, dtype=torch.long)
    mask[0, 10:] = 0
    return {**text(size), "attention_mask": mask}


def images(size: int) -> Tensor:
    return torch.randn(size, 3, 16, 16)


def labelled_images(size: int) -> dict[str, Tensor]:
    return {"pixel_values": images(size), "labels": torch.arange(size) % 2}


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


MODELS = {
    "sequential": Model(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))),
        lambda size: torch.randn(size, 8),
        square,
    ),
    "gpt": Model(lambda: GPT(layers=4, width=32, heads=2), tokens, square),
    "biased": Model(Biased, lambda size: torch.randn(size, 8), square),
    "vit": Model(ViT, images, square),
    "resnet": Model(resnet, images, square),
    "gpt2": Model(gpt2, text, own_loss),
    "gpt2 with cache": Model(gpt2_with_cache, text, own_loss),
    "llama": Model(llama, text, own_loss),
    "bert": Model(bert, masked_text, own_loss),
    "hugging face vit": Model(vit_of_hugging_face, labelled_images, own_loss),
    "t5 encoder": Model(
        lambda: t5("EncoderModel"), lambda size: {"input_ids": tokens(size)}, lambda o: square(o.last_hidden_state)
    ),
}


def call(model: Any, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(batch)


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy without numbers, tied where the model is."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        meta = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(meta, requires_grad=tensor.requires_grad) if is_parameter else meta
    return copy.deepcopy(model, memo)


def numbers_of(model: nn.Module) -> Callable[[str], Tensor]:
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return lambda name: known[name].detach().clone()
