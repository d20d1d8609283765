"""Tensors of a build that have a shape and no numbers, and the private parts of torch that they stand on.

When torch moves those, tests/parallel/building/test_shapes.py says which need is no longer met.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import JobError
from shoal.parallel.building.tape import CPU, Cell, Note, Ref, leaves
from shoal.profile.torch_private import FakeTensor, FakeTensorMode

SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__  # what `tensor.data = other` calls


class CannotDefer(Exception):
    """The builder did what the tape cannot say."""


class Shapes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Works out shapes for the recorder. What anybody else does to them would be lost: it is refused and kept here."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = ""
        self._recording_thread: int | None = None
        self._allow_unsafe_data_ptr_access = False  # otherwise all addresses are 0, and all tensors seem to be tied

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return CPU
        if self._recording_thread != threading.get_ident():
            self.refused = (
                f"{func} takes a tensor that model() made and whose numbers are not there. Make it a parameter, a "
                f"buffer or an attribute of a module, and build the model in one thread."
            )
            raise JobError(self.refused)
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Work out shapes in this thread."""
        self._recording_thread = threading.get_ident()
        try:
            with self:
                yield
        finally:
            self._recording_thread = None
            # It remembers what it made by weak references, and a tensor that has one refuses `module.to(dtype)`.
            self.fake_tensor_converter.tensor_memo.clear()

    @contextlib.contextmanager
    def remember_refusal(self) -> Iterator[None]:
        """Keep in `refused` that CannotDefer was raised: the builder may catch it and go another way than plainly."""
        try:
            yield
        except CannotDefer as refusal:
            self.refused = str(refusal)
            raise

    def like(self, tensor: Tensor) -> Tensor:
        """Return a shape with the layout of `tensor`, on a storage of its own."""
        if tensor.device != CPU:
            raise CannotDefer(f"model() makes a tensor of {tuple(tensor.shape)} on {tensor.device}")
        with self.recorded():
            length = tensor.untyped_storage().nbytes() // tensor.element_size()
            flat: Tensor = torch.empty(length, dtype=tensor.dtype, device=CPU)
            return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def cell_of(shape: Tensor) -> Cell | None:
    """Return the cell of a shape: it is on the storage, which all views share, and goes with it."""
    return vars(shape.untyped_storage()).get("cell")


def make_cell(shape: Tensor, note: Note) -> None:
    """Say that `note` made the storage of `shape`."""
    vars(shape.untyped_storage())["cell"] = Cell(shape.untyped_storage().nbytes(), note)


def ref_of(shape: Tensor) -> Ref:
    """Return where `shape` lies and the note that wrote there last."""
    cell = cell_of(shape)
    if cell is None or shape.untyped_storage().nbytes() != cell.num_bytes or shape.is_conj() or shape.is_neg():
        raise CannotDefer(f"model() makes a tensor of {tuple(shape.shape)} by resizing or conjugation")
    return Ref(cell, cell.writer, shape.size(), shape.stride(), int(shape.storage_offset()), shape.dtype)


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among the arguments that `func` writes to."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += leaves(Tensor, args[position] if position < len(args) else kwargs.get(argument.name))
    return found


def builders_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that the builder has put on a parameter or buffer."""
    shapes_own = _shapes_attributes() if isinstance(tensor, FakeTensor) else set()
    return {name: value for name, value in vars(tensor).items() if name not in shapes_own}


@functools.cache
def _shapes_attributes() -> set[str]:
    with FakeTensorMode():
        return {*vars(torch.empty(0)), "_is_param"}
