"""What `shoal verify` wants of a run besides its events: the final parameters, and how large each gradient ever was."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shoal.comm.mesh import Position
from shoal.core.files import write_whole
from shoal.parallel.gradients import local_gradient
from shoal.parallel.layout import Layout


class Recording:
    """One worker's part of it."""

    def __init__(self, layout: Layout, position: Position, folder: Path) -> None:
        self._layout, self._position, self._folder = layout, position, folder
        self._largest: dict[str, torch.Tensor] = {}

    def nudge(self) -> None:
        """Move every weight to the next number that its type has, up or down by chance; of a worker that has them all.

        What two trainings from there are apart is what rounding alone does to the model.
        """
        chance = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self._layout.parameters.values():
                up = torch.rand(parameter.shape, generator=chance).to(parameter.device) < 0.5
                towards = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
                is_zero = parameter == 0  # next to 0 is a number that no sum would notice
                parameter.copy_(torch.where(is_zero, parameter, torch.nextafter(parameter, towards)))

    def note_gradients(self) -> None:
        """Keep the largest that each number of the gradient has been: only where one worker has it all."""
        if self._position.mesh.workers > 1:
            return
        for name, parameter in self._layout.parameters.items():
            gradient = local_gradient(parameter)
            if gradient is not None:
                size = gradient.detach().abs()
                self._largest[name] = torch.maximum(self._largest[name], size) if name in self._largest else size

    def write(self) -> None:
        """Gather the parameters and write them, one file a stage. Called by every worker."""
        is_writer = self._position.data == 0 and self._position.tensor == 0
        parameters = {}
        for name in self._layout.parameters:
            whole = self._layout.whole(name)
            if is_writer:
                parameters[name] = whole.cpu()
        if is_writer:
            self._folder.mkdir(exist_ok=True)
            largest = {name: size.cpu() for name, size in self._largest.items()}
            buffer = io.BytesIO()
            torch.save({"parameters": parameters, "largest": largest}, buffer)
            write_whole(self._folder / f"stage-{self._position.pipeline}.pt", buffer.getvalue())


def read_recording(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the parameters of all stages by name, and the largest gradients where they were kept."""
    parameters: dict[str, torch.Tensor] = {}
    largest: dict[str, torch.Tensor] = {}
    for file in _loaded(folder):
        for name, tensor in file["parameters"].items():
            parameters.setdefault(name, tensor)
        largest |= file["largest"]
    return parameters, largest


def _loaded(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("stage-*.pt")):
        yield torch.load(path, map_location="cpu", weights_only=True)
