"""A job from a Hugging Face config file: the model as transformers builds it, random samples of the shape it takes."""

import json
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import ConfigError, JobError
from shoal.spec.job import Job

_LONGEST = 2048
"""The samples' length unless asked otherwise: many configs allow far longer ones than anybody trains with."""


class RandomSamples(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples with the right shapes and no meaning, made when they are asked for."""

    def __init__(self, shapes: dict[str, tuple[tuple[int, ...], int | None]], count: int) -> None:
        self._shapes, self._count = shapes, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {name: _random(shape, below, generator) for name, (shape, below) in self._shapes.items()}


def job_from_config(path: Path, *, sequence: int | None = None, batch_size: int = 64) -> Job:
    """Return the job that trains the model of the config file `path` with AdamW, in the precision it names."""
    config = _read_config(path)
    model_class = _model_class(config, path)
    return Job(
        model=lambda: _build(model_class, config),
        inputs=lambda batch: batch,
        loss=lambda out, _: out.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        data=RandomSamples(_shapes(model_class, config, sequence), count=1 << 20),
        batch_size=batch_size,
        steps=1,
    )


def _read_config(path: Path) -> Any:
    transformers = _transformers()
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a config of Hugging Face: {error}.") from None
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ConfigError(f"{path} has no 'model_type': it is not a config of a Hugging Face model.")
    try:
        return transformers.AutoConfig.for_model(**fields)
    except Exception as error:
        raise ConfigError(f"transformers cannot read {path}: {str(error).splitlines()[0]}") from None


def _model_class(config: Any, path: Path) -> Any:
    transformers = _transformers()
    names = [name for name in config.architectures or [] if hasattr(transformers, name)]
    if names:
        return getattr(transformers, names[0])
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageClassification):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ConfigError(f"{path} names no architecture that transformers {transformers.__version__} can train.")


def _build(model_class: Any, config: Any) -> Any:
    if getattr(config, "use_cache", False):
        config.use_cache = False  # it serves generation; in training it keeps keys and values that nobody reads
    model = model_class._from_config(config)
    return model.train()


def _shapes(model_class: Any, config: Any, sequence: int | None) -> dict[str, tuple[tuple[int, ...], int | None]]:
    if model_class.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        image = (config.num_channels, height, width)
        return {"pixel_values": (image, None), "labels": ((), config.num_labels)}
    if model_class.main_input_name != "input_ids":
        raise JobError(f"{model_class.__name__} takes {model_class.main_input_name}: write a job file for it.")
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or _LONGEST
    length = sequence or min(longest, _LONGEST)
    tokens = ((length,), text.vocab_size)
    is_label_per_token = any(word in model_class.__name__ for word in ("LM", "ConditionalGeneration", "Token"))
    return {"input_ids": tokens, "labels": tokens if is_label_per_token else ((), config.num_labels)}


def _random(shape: tuple[int, ...], below: int | None, generator: torch.Generator) -> torch.Tensor:
    if below is None:
        return torch.randn(shape, generator=generator)
    return torch.randint(below, shape, generator=generator)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError("a Hugging Face config needs transformers: pip install 'shoal[hf]'.") from None
    return transformers
