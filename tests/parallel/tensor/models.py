"""Small models to divide, each with the loss of a seeded batch; no dropout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.jobs import GPT

WIDTH, HEADS, TOKENS, VOCABULARY = 32, 4, 16, 64


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    pairs: int = 2
    """How many sums a block makes in forward; 0 where it is another number in backward."""


def token_batch(seed: int, below: int = VOCABULARY) -> Tensor:
    return torch.randint(below, (4, TOKENS), generator=torch.Generator().manual_seed(seed))


def vectors(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Feed(nn.Module):
    """A block of two linears, with biases, that overwrites its hidden layer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x)), inplace=True))  # type: ignore[no-any-return]


class Feeds(nn.Module):
    """A list of Feed blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feed() for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)  # type: ignore[no-any-return]


class Grouped(nn.Module):
    """Attention by hand: one projection of 4 heads of queries and 2 of keys and of values, products written out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.size, self.how = HEADS, 2, WIDTH // HEADS, how
        self.norm = nn.LayerNorm(WIDTH)
        self.packed = nn.Linear(WIDTH, (HEADS + 4) * self.size)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.taken_apart(self.packed(self.norm(x)))
        query = query.reshape(batch, length, HEADS, self.size).transpose(1, 2)
        key, value = (t.reshape(batch, length, 2, self.size).transpose(1, 2) for t in (key, value))
        key, value = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(query.shape) for t in (key, value))
        scores = query @ key.transpose(-2, -1) / self.size**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        mixed = torch.matmul(scores.softmax(-1), value)
        return x + self.mix(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def taken_apart(self, packed: Any) -> Any:
        kv = 2 * self.size
        if self.how == "split":
            return packed.split([WIDTH, kv, kv], dim=-1)
        if self.how == "slices":
            return packed[..., :WIDTH], packed[..., WIDTH : WIDTH + kv], packed[..., WIDTH + kv :]
        if self.how == "heads":
            return packed.unflatten(-1, (HEADS + 4, self.size)).split([HEADS, 2, 2], dim=2)
        if self.how == "cat":  # nothing that we know: the tensor is put together
            again: Any = torch.cat([packed, packed], -1)[..., : packed.shape[-1]]
            return again.split([WIDTH, kv, kv], dim=-1)
        raise ValueError(self.how)


class Summed(nn.Module):
    """Attention in einsums, with a bias of positions that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.norm = HEADS, nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = (f(normed).unflatten(-1, (HEADS, -1)) for f in (self.query, self.key, self.value))
        weights = (torch.einsum("bqhd,bkhd->bhqk", query, key) + self.bias).softmax(-1)
        return x + self.out(torch.einsum("bhqk, bkhd -> bqhd", weights, value).flatten(-2))  # type: ignore[no-any-return]


class Groups(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Grouped(how) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def small_gpt() -> nn.Module:
    model: nn.Module = GPT(layers=2, width=WIDTH, heads=HEADS)
    return model


def hugging_face(model: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        built = getattr(transformers, model)(getattr(transformers, config)(**fields))
        assert isinstance(built, nn.Module)
        return built.train()

    return build


def gpt_loss(model: nn.Module, seed: int) -> Tensor:
    tokens = token_batch(seed, 256)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def language_loss(model: nn.Module, seed: int) -> Tensor:
    tokens = token_batch(seed)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def masked_loss(model: nn.Module, seed: int) -> Tensor:
    tokens = token_batch(seed)
    mask = torch.ones_like(tokens)
    mask[0, -4:] = 0
    loss: Tensor = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
    return loss


def image_loss(model: nn.Module, seed: int) -> Tensor:
    loss: Tensor = model(pixel_values=vectors(seed, 4, 3, 12, 20), labels=torch.tensor([0, 1, 1, 1]), **_VIT_CALL).loss
    return loss


def square_loss(model: nn.Module, seed: int) -> Tensor:
    out: Tensor = model(vectors(seed, 4, TOKENS, WIDTH))
    return out.square().mean()


_VIT_CALL = {"interpolate_pos_encoding": False}
_SIZES = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS}
_TEXT = _SIZES | {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {
    "n_layer": 2,
    "n_head": HEADS,
    "n_embd": WIDTH,
    "n_positions": TOKENS,
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": HEADS, "dropout_rate": 0.0} | {
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_GROUPED = _TEXT | {"num_key_value_heads": 2}

CASES = {
    "gpt": Case(small_gpt, gpt_loss),
    "gpt2": Case(hugging_face("GPT2LMHeadModel", "GPT2Config", **_GPT2), language_loss),
    "gpt2 eager": Case(
        hugging_face("GPT2LMHeadModel", "GPT2Config", attn_implementation="eager", **_GPT2), language_loss
    ),
    "llama": Case(hugging_face("LlamaForCausalLM", "LlamaConfig", **_GROUPED), language_loss),
    "llama padded": Case(hugging_face("LlamaForCausalLM", "LlamaConfig", **_GROUPED), masked_loss),
    "qwen3": Case(hugging_face("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **_GROUPED), language_loss),
    "phi3": Case(hugging_face("Phi3ForCausalLM", "Phi3Config", **_GROUPED), language_loss),
    "neox": Case(hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **_TEXT), language_loss),
    "mixtral": Case(
        hugging_face("MixtralForCausalLM", "MixtralConfig", num_local_experts=2, **_GROUPED), language_loss, 1
    ),
    "bert": Case(hugging_face("BertForMaskedLM", "BertConfig", **_TEXT, **_NO_DROPOUT), masked_loss),
    "vit": Case(
        # 15 patches and the class token are 16.
        hugging_face(
            "ViTForImageClassification", "ViTConfig", image_size=(12, 20), patch_size=4, **_SIZES, **_NO_DROPOUT
        ),
        image_loss,
    ),
    "encoder": Case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        square_loss,
        1,
    ),
    "feeds": Case(Feeds, square_loss, 1),
    "flat": Case(lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(inplace=True), nn.Linear(64, 4)), square_loss, 0),
    "einsum": Case(lambda: nn.Sequential(Summed(), Summed()), square_loss, 0),
    "t5": Case(hugging_face("T5ForConditionalGeneration", "T5Config", **_T5), language_loss, 0),
    "grouped split": Case(lambda: Groups("split"), square_loss, 1),
    "grouped slices": Case(lambda: Groups("slices"), square_loss, 1),
    "grouped heads": Case(lambda: Groups("heads"), square_loss, 1),
    "grouped cat": Case(lambda: Groups("cat"), square_loss, 0),
}
