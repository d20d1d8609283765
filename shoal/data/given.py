"""Data as it is given to a Job: what is taken of a DataLoader, a stream or a Hugging Face dataset, and what is lost.

1. A DataLoader is taken apart: its dataset, its batch size (as the global one), its collate_fn, drop_last, its order.
   torch's own shuffling becomes shoal's; any other sampler is asked for the order of each epoch (sampled.py).
2. What can only be iterated over becomes a Stream (stream.py).
3. Of a Hugging Face dataset without a format, columns come as tensors: lists of numbers would be collated transposed.
"""

from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from shoal.core.errors import ConfigError
from shoal.data.sampled import batch_sizes, check_sampler
from shoal.data.stream import Stream
from shoal.spec.job import is_map_style

if TYPE_CHECKING:
    from shoal.spec.job import Job

_STREAM = (
    "Job.data is a stream: without random access, every worker reads all of it and keeps its own samples, a resume "
    "reads it again up to where the run was, and shoal does not shuffle it."
)


def taken(job: "Job") -> dict[str, Any]:
    """Return the fields of `job` that its data decides, with their values; of data that is taken as it is, none."""
    fields: dict[str, Any] = {}
    notes: list[str] = []
    data = job.data
    if isinstance(data, DataLoader):
        fields |= _of_loader(data, job, notes)
        data = data.dataset
    elif job.collate is None:
        data = _formatted(data)
    if _is_stream(data, "data"):
        data = Stream(data)
        notes.insert(0, _STREAM)
    if job.sampler is not None or "sampler" in fields:
        _check_order(fields.get("sampler", job.sampler), data, job.seed)
    if data is not job.data:
        fields["data"] = data
    fields |= _of_eval(job)
    return fields | ({"notes": (*job.notes, *notes)} if notes else {})


def _of_eval(job: "Job") -> dict[str, Any]:
    """Return what is evaluated on. All of a DataLoader's samples are, whatever its batches."""
    data, fields = job.eval_data, {}
    if isinstance(data, DataLoader):
        _check_samples(data, "eval_data")
        batches = data.batch_sampler
        sampler = batches.sampler if type(batches) is BatchSampler else batches
        if not _iterates(data.dataset) and not _takes_all(sampler, data.dataset):
            raise ConfigError(
                f"Job.eval_data has a {type(sampler).__name__}: all samples of its dataset are evaluated. "
                "Give the samples themselves, such as a torch.utils.data.Subset."
            )
        if job.eval_collate is None:
            fields["eval_collate"] = data.collate_fn
        data = data.dataset
    elif job.collate is None and job.eval_collate is None:
        data = _formatted(data)
    if data is not None and _is_stream(data, "eval_data"):
        data = Stream(data)
    return fields | ({"eval_data": data} if data is not job.eval_data else {})


def _of_loader(loader: "DataLoader[Any]", job: "Job", notes: list[str]) -> dict[str, Any]:
    """Return the job's fields that `loader` decides, and add to `notes` what of it is not used."""
    _check_samples(loader, "data")
    fields: dict[str, Any] = {"drop_last": loader.drop_last}
    if job.drop_last and not loader.drop_last:
        raise ConfigError(
            "Job.drop_last=True, and its DataLoader gives the last, partial batch too. Say it there: give "
            "drop_last=True to the DataLoader, or to its batch_sampler."
        )
    if job.sampler is not None:
        raise ConfigError("Job.sampler beside a DataLoader, which has its own: give one of the two.")
    if job.collate is None:
        fields["collate"] = loader.collate_fn
    elif loader.collate_fn is not default_collate:
        raise ConfigError("Job.collate beside a DataLoader with a collate_fn: give one of the two.")
    size = loader.batch_size
    order = "in the order of its stream"
    if not _iterates(loader.dataset):
        size, order, sampling = _order_of(loader)
        fields |= sampling
    if job.batch_size not in (0, size):
        raise ConfigError(
            f"Job.batch_size={job.batch_size}, and its DataLoader makes batches of {size}. The global batch has one "
            "size: leave batch_size out of the Job."
        )
    fields["batch_size"] = size
    notes.append(f"The DataLoader is taken apart: global batches of {size} samples {order}{_unused(loader)}.")
    return fields


def _unused(loader: "DataLoader[Any]") -> str:
    """Return what of `loader` the plan decides, as the end of a sentence."""
    count, unused = loader.num_workers, ["worker_init_fn"] * (loader.worker_init_fn is not None)
    if count:
        unused.insert(0, f"num_workers={count}")
    said = f"; its {' and '.join(unused)} {'is' if len(unused) == 1 else 'are'} not used: threads load"
    processes = f", or {count} processes by --loader-workers {count}" if count and not _iterates(loader.dataset) else ""
    return f"{said}{processes}" if unused else ""


def _check_samples(loader: "DataLoader[Any]", name: str) -> None:
    """Refuse a DataLoader that is given whole batches."""
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ConfigError(
            f"Job.{name} is a DataLoader with batch_size=None: its dataset makes the batches, which nobody can cut "
            "among workers. Give a dataset of samples, and the DataLoader a batch_size."
        )


def _order_of(loader: "DataLoader[Any]") -> tuple[int, str, dict[str, Any]]:
    """Return the batch size of a map-style `loader`, its order in words, and the job's fields for it."""
    if type(loader.batch_sampler) is not BatchSampler:
        return _of_batches(loader.batch_sampler)
    sampler, size = loader.batch_sampler.sampler, loader.batch_sampler.batch_size
    fields: dict[str, Any] = {"drop_last": loader.batch_sampler.drop_last}
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(
            "Job.data is a DataLoader with a DistributedSampler, which cuts the data for a number of workers: shoal "
            "does that itself. Leave the sampler out (shuffle=True instead), and give the batch size of all together."
        )
    if _takes_all(sampler, loader.dataset):
        if type(sampler) is SequentialSampler:
            return size, "in the order of its dataset", fields | {"shuffle": False}
        return size, "in shoal's own shuffled order, a function of Job.seed, not of torch's", fields | {"shuffle": True}
    order = f"in the order of its {type(sampler).__name__}, drawn for each epoch by every worker from Job.seed"
    return size, order, fields | {"sampler": sampler}


def _takes_all(sampler: Any, dataset: Any) -> bool:
    """Return whether `sampler` is one of torch's own that takes each sample of `dataset` once."""
    if type(sampler) not in (SequentialSampler, RandomSampler) or getattr(sampler, "replacement", False):
        return False
    return not is_map_style(dataset) or len(sampler) == len(dataset)


def _of_batches(sampler: Any) -> tuple[int, str, dict[str, Any]]:
    """Return the same for a sampler of batches of the user's own."""
    name = type(sampler).__name__
    sizes = batch_sizes(sampler)
    if len(sizes) != 1:
        raise ConfigError(
            f"Job.data is a DataLoader whose {name} makes batches of {min(sizes, default=0)} to "
            f"{max(sizes, default=0)} samples: a global batch has one size. Let all but the last be equal, or "
            "give an ordinary sampler."
        )
    return sizes.pop(), f"in the batches of its {name}, drawn for each epoch by every worker", {"sampler": sampler}


def _check_order(sampler: Any, data: Any, seed: int) -> None:
    if sampler is None:
        return
    if isinstance(data, Stream):
        raise ConfigError("Job.sampler gives the order of samples, and Job.data is a stream, which has its own.")
    check_sampler(sampler, seed=seed)


def _iterates(data: Any) -> bool:
    return isinstance(data, IterableDataset)


def _is_stream(data: Any, name: str) -> bool:
    """Return whether `data` can only be iterated over; refuse what cannot be iterated over again."""
    if isinstance(data, Stream) or (is_map_style(data) and not _iterates(data)):
        return False
    if hasattr(data, "__next__"):
        raise ConfigError(
            f"Job.{name} is a {type(data).__name__}, which can be read only once. Give something that iter() begins "
            "anew: a torch.utils.data.IterableDataset, or a class with __iter__."
        )
    if _is_of_datasets(data, "DatasetDict", "IterableDatasetDict"):
        raise ConfigError(f"Job.{name} has the splits {', '.join(data)}. Take one of them: data[{next(iter(data))!r}].")
    return hasattr(data, "__iter__") and not isinstance(data, (str, bytes, dict))


def _formatted(data: Any) -> Any:
    """Return a dataset of Hugging Face with its columns as tensors, unless it has a format; others as they are."""
    if _is_of_datasets(data, "IterableDataset"):
        has_format = data._formatting is not None  # a stream of `datasets` tells it nowhere else
    elif _is_of_datasets(data, "Dataset"):
        has_format = data.format["type"] is not None
    else:
        return data
    return data if has_format else data.with_format("torch")


def _is_of_datasets(data: Any, *names: str) -> bool:
    return any(cls.__name__ in names and cls.__module__.split(".")[0] == "datasets" for cls in type(data).__mro__)
