"""What reads the data that a Loader is given."""

import os
from collections.abc import Callable
from typing import Any

from shoal.core.errors import ConfigError
from shoal.data.loading.chunk import Reader
from shoal.data.loading.dataset import DatasetReader
from shoal.data.loading.transform import Transform
from shoal.data.pack.reader import Pack
from shoal.data.stage.staged import Staged
from shoal.data.view import View


def reader_of(
    data: Any,
    *,
    collate: Callable[[list[Any]], Any] | None,
    index: int,
    transform: Callable[..., Any] | None,
    **options: Any,
) -> Reader:
    """Return what reads `data`: its own way for packs, sample by sample for the rest."""
    is_pack = isinstance(data, (str, os.PathLike, Pack, Staged))
    if is_pack and collate is None:
        return View(data, transform=transform, **options)
    if isinstance(data, View) and collate is None and transform is not None:
        return data.transformed(transform)
    asked = [name for name, value in options.items() if value not in (None, False, "list")]
    if asked and not is_pack:
        raise ConfigError(f"Loader({', '.join(asked)}=...) is for the path of a pack, not for {type(data).__name__}.")
    if isinstance(data, View) and collate is None:
        return data
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or isinstance(data, dict):
        raise ConfigError(f"Loader needs a pack or a dataset with len() and [index], not {type(data).__name__}.")
    samples = View(data, **options) if is_pack else data
    if len(samples) == 0:
        raise ConfigError("the dataset is empty: there is nothing to load.")
    finish, arriving = Transform(transform) if transform else None, samples.arriving if is_pack else None
    return DatasetReader(samples, collate=collate, finish=finish, index=index, arriving=arriving)
