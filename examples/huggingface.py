"""A small Llama on text that every machine has, with Hugging Face's tokenizers, datasets and transformers, offline.

shoal train examples/huggingface.py --workers 2
"""

import sysconfig
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers

import shoal

CONTEXT, VOCABULARY = 64, 1024
STEPS = 40
datasets.disable_progress_bars()


def documents() -> "datasets.Dataset":
    """The sources of a few modules of Python's own standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return datasets.Dataset.from_dict(
        {"text": [path.read_text(encoding="utf-8") for path in sorted(folder.glob("t*.py"))]}
    )


def trained_tokenizer(texts: list[str]) -> "transformers.PreTrainedTokenizerFast":
    """A byte-level BPE, learned from `texts`: the same on every worker."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")  # type: ignore[no-untyped-call]  # noqa: S106


def windows(batch: dict[str, list[str]], tokenizer: Any) -> dict[str, list[list[int]]]:
    """The tokens of all texts, one after another, in windows of CONTEXT."""
    tokens = [token for ids in tokenizer(batch["text"])["input_ids"] for token in [*ids, tokenizer.eos_token_id]]
    return {"input_ids": [tokens[at : at + CONTEXT] for at in range(0, len(tokens) - CONTEXT + 1, CONTEXT)]}


def model() -> "transformers.LlamaForCausalLM":
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


texts = documents()
tokenizer = trained_tokenizer(texts["text"][:])
data = texts.map(windows, batched=True, remove_columns=["text"], fn_kwargs={"tokenizer": tokenizer})
parts = data.train_test_split(test_size=64, seed=0)

job = shoal.Job(
    model=model,
    inputs=lambda batch: {"input_ids": batch["input_ids"], "labels": batch["input_ids"]},
    loss=lambda output, _: output.loss,  # the model's own: the mean over tokens, of which all windows have as many
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    schedule=lambda optimizer: transformers.get_cosine_schedule_with_warmup(optimizer, 4, STEPS),
    data=parts["train"],  # columns come as tensors; without a format that is what shoal asks for
    eval_data=parts["test"],
    batch_size=16,
    steps=STEPS,
    clip_norm=1.0,
)

if __name__ == "__main__":
    shoal.train(job)
