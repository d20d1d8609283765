"""The model families of docs/models.md: each as its library builds it from a small config, with its own loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families_timm import declare_operators, timm_model
from shoal.spec.job import Job

WIDTH, HEADS, LENGTH, VOCABULARY, CLASSES, LAYERS = 32, 4, 16, 64, 10, 4
BATCH = 8
_SAMPLES = 2 * BATCH + 3  # an epoch's last batch is partial
_IGNORED = -100

Sample = dict[str, Tensor]


class Samples(torch.utils.data.Dataset[Sample]):
    """Random samples, always the same: `make(generator)` returns one."""

    def __init__(self, make: Callable[[torch.Generator], Sample]) -> None:
        self._make = make

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return self._make(torch.Generator().manual_seed(index))


def tokens(generator: torch.Generator) -> Sample:
    """Return a sentence to be predicted token by token."""
    ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
    return {"input_ids": ids, "labels": ids}


def masked(generator: torch.Generator) -> Sample:
    """Return a padded sentence of which some tokens are to be predicted."""
    ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
    length = int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=generator))
    mask = torch.arange(LENGTH) < length
    asked = (torch.rand(LENGTH, generator=generator) < 0.3) & mask
    asked[0] = True
    ids = torch.where(mask, ids, 1)
    return {
        "input_ids": torch.where(asked, 2, ids),
        "attention_mask": mask.long(),
        "labels": torch.where(asked, ids, _IGNORED),
    }


def pairs(generator: torch.Generator) -> Sample:
    """Return a sentence and its translation."""
    source, target = (torch.randint(3, VOCABULARY, (size,), generator=generator) for size in (LENGTH, LENGTH // 2))
    return {"input_ids": source, "labels": target}


def image(generator: torch.Generator, size: int = 32) -> Sample:
    """Return an image and its class."""
    pixels = torch.randn(3, size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (), generator=generator)}


def large_image(generator: torch.Generator) -> Sample:
    """Return an image that is more than one pixel where a convolutional network looks at it last."""
    return image(generator, size=64)


@dataclass(frozen=True)
class Family:
    """A family of models: the class of transformers that builds it, or the name that timm knows it by."""

    kind: str
    """What it is trained to do."""
    model: str
    """The class in transformers; with "timm/" in front, the name in timm."""
    make: Callable[[torch.Generator], Sample]
    config: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 0.05
    refused: Mapping[str, str] = field(default_factory=dict)
    """The axes that cannot divide it, each with words of the sentence that says why."""

    def build(self) -> nn.Module:
        """Return the model, as its library builds it."""
        if self.model.startswith("timm/"):
            return timm_model(self.model.removeprefix("timm/"), num_classes=CLASSES, **self.config)
        declare_operators()  # transformers imports torchvision where there is one
        import transformers

        model_class = getattr(transformers, self.model)
        config = model_class.config_class(**self.config)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        model: nn.Module = model_class._from_config(config)
        return model.train()


def job(name: str, steps: int = 4) -> Job:
    """Return the job that trains the family `name`."""
    family = FAMILIES[name]
    is_timm = family.model.startswith("timm/")
    return Job(
        model=family.build,
        inputs=(lambda batch: batch["pixel_values"]) if is_timm else (lambda batch: batch),
        loss=(lambda out, batch: F.cross_entropy(out, batch["labels"])) if is_timm else (lambda out, _: out.loss),
        weight=(lambda batch: (batch["labels"] != _IGNORED).sum()) if family.make is masked else None,
        # Not Adam, which makes full steps of gradients that are rounding: it hides, or imitates, differences.
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=family.lr, momentum=0.9),
        data=Samples(family.make),
        batch_size=BATCH,
        steps=steps,
    )


def _text(**fields: Any) -> dict[str, Any]:
    """Return the fields that most configs of language models have, and `fields`."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "max_position_embeddings": 2 * LENGTH, "pad_token_id": 1, "bos_token_id": 0,
        "eos_token_id": 0, **fields,
    }  # fmt: skip


def _two_sided(**fields: Any) -> dict[str, Any]:
    """Return the fields of encoders and decoders that BART's kin have."""
    return {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 1,
        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 2 * WIDTH,
        "decoder_ffn_dim": 2 * WIDTH, "max_position_embeddings": 2 * LENGTH, "bos_token_id": 0, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": None, **fields,
    }  # fmt: skip


_TWO_SIDED = {"pipeline": "returns again behind this block"}
_NO_PAIRS = {"tensor": "the model has no layer that can be divided"}
_BATCH_NORM = _NO_PAIRS | {"pipeline": "is a batch norm"}
_KV = {"num_key_value_heads": 2}
_IMAGE = {"image_size": 32, "num_channels": 3, "num_labels": CLASSES}
_CAUSAL, _MASKED, _PAIRS, _VISION = "causal LM", "masked LM", "encoder-decoder", "vision"

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        _CAUSAL, "GPT2LMHeadModel", tokens,
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * LENGTH,
         "bos_token_id": 0, "eos_token_id": 0},
    ),
    "llama": Family(_CAUSAL, "LlamaForCausalLM", tokens, _text(**_KV)),
    "mistral": Family(_CAUSAL, "MistralForCausalLM", tokens, _text(**_KV, sliding_window=8)),
    "qwen2": Family(_CAUSAL, "Qwen2ForCausalLM", tokens, _text(**_KV, tie_word_embeddings=True)),
    "qwen3": Family(_CAUSAL, "Qwen3ForCausalLM", tokens, _text(**_KV, head_dim=8)),
    "gemma2": Family(_CAUSAL, "Gemma2ForCausalLM", tokens, _text(**_KV, head_dim=8, query_pre_attn_scalar=8)),
    "phi": Family(_CAUSAL, "PhiForCausalLM", tokens, _text(partial_rotary_factor=0.5)),
    "gpt-neox": Family(_CAUSAL, "GPTNeoXForCausalLM", tokens, _text()),
    "opt": Family(
        _CAUSAL, "OPTForCausalLM", tokens, _text(ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH),
    ),
    "bloom": Family(
        _CAUSAL, "BloomForCausalLM", tokens,
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "bos_token_id": 0,
         "eos_token_id": 0, "pad_token_id": 1},
    ),
    "falcon": Family(
        _CAUSAL, "FalconForCausalLM", tokens, _text(new_decoder_architecture=False, multi_query=True),
        refused={"tensor": "layers of FalconLinear"},
    ),
    "mixtral": Family(
        _CAUSAL, "MixtralForCausalLM", tokens, _text(**_KV, num_local_experts=4, num_experts_per_tok=2),
    ),
    "mamba": Family(
        _CAUSAL, "MambaForCausalLM", tokens,
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8,
         "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1},
    ),
    "bert": Family(_MASKED, "BertForMaskedLM", masked, _text()),
    "roberta": Family(_MASKED, "RobertaForMaskedLM", masked, _text()),
    "distilbert": Family(
        _MASKED, "DistilBertForMaskedLM", masked,
        {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 2 * WIDTH,
         "max_position_embeddings": 2 * LENGTH, "pad_token_id": 1},
    ),
    "electra": Family(_MASKED, "ElectraForMaskedLM", masked, _text(embedding_size=WIDTH // 2)),
    "deberta-v2": Family(
        _MASKED, "DebertaV2ForMaskedLM", masked,
        _text(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, type_vocab_size=0),
    ),
    "t5": Family(
        _PAIRS, "T5ForConditionalGeneration", pairs,
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": HEADS,
         "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        refused=_TWO_SIDED,
    ),
    "bart": Family(_PAIRS, "BartForConditionalGeneration", pairs, _two_sided(), refused=_TWO_SIDED),
    "vit": Family(_VISION, "ViTForImageClassification", image, _text(**_IMAGE, patch_size=8)),
    "swin": Family(
        _VISION, "SwinForImageClassification", image,
        {**_IMAGE, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "convnext": Family(
        _VISION, "ConvNextForImageClassification", image,
        {**_IMAGE, "hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "patch_size": 4},
    ),
    "timm resnet": Family(_VISION, "timm/resnet18", large_image, refused=_BATCH_NORM),
    "timm vit": Family(
        _VISION, "timm/vit_tiny_patch16_224", image,
        {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS},
    ),
    # Its gradient has a norm of 250 at first: at 0.05 the loss rises from 5.6 to 19.5 in four steps, and one process
    # whose weights begin one rounding apart ends 3e-3 away from itself.
    "timm efficientnet": Family(_VISION, "timm/efficientnet_b0", large_image, lr=0.0002, refused=_BATCH_NORM),
    "timm convnext": Family(
        _VISION, "timm/convnext_atto", image, {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64)}, refused=_NO_PAIRS,
    ),
}  # fmt: skip
"""Each family by its name."""
