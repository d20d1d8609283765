"""Weights & Biases, by its own library.

1. With an account on this machine (`wandb login`, WANDB_API_KEY) the run is there while it goes. Without one, where the
   server does not answer, or with WANDB_MODE=offline, it is kept in the run folder's wandb/, for `wandb sync`. Which
   mode it is the library says, from WANDB_MODE and its settings files; switched off, it is told everything, and keeps
   nothing.
2. The id of the run is kept in the run folder: one that goes on is the same run there. Offline, each start leaves a
   folder of its own with this id, and `wandb sync` says that it sends them in the order of their start (0.30).
3. WANDB_PROJECT, WANDB_ENTITY and the library's other variables count; without a project, it is the job file's name.
"""

import logging
import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoal.core.run_folder import RunFolder
from shoal.training.loggers.logger import Kept

if TYPE_CHECKING:
    import wandb

INIT_S = 30.0
"""How long the server may take to answer before the run is kept offline: the library's own 90 s have no need to be,
as nothing is lost."""
_ONLINE = ("online", "run")
"""What the library calls the mode in which one process sends the run while it goes."""


class WandB:
    """A run of Weights & Biases."""

    is_apart: ClassVar[bool] = True

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._run: wandb.Run | None = None

    @staticmethod
    def check() -> None:
        """Raise nothing: without an account or a network, it works offline."""

    def start(self, config: Mapping[str, Any], kept: Kept) -> None:
        """Begin the run, or go on with it."""
        import wandb

        logging.getLogger("wandb").setLevel(logging.ERROR)  # it would tell of files that it only links to
        os.environ.setdefault("WANDB_SILENT", "true")
        if not kept.id:  # it was switched off until now
            kept.step, kept.is_whole = 0, False
        id_ = kept.id or secrets.token_hex(4)
        is_online = wandb.setup().settings.mode in _ONLINE
        try:
            self._run = self._init(config, id_, mode=None, is_online=is_online)
        except (wandb.errors.CommError, wandb.errors.UsageError) as error:
            if not is_online:
                raise
            why = str(error).splitlines()[0].rstrip(".")
            print(f"wandb: {why}. The run is kept offline. Later: {_sync(self._folder)}", file=sys.stderr, flush=True)
            self._run = self._init(config, id_, mode="offline", is_online=False)
        if self._run.disabled:
            kept.where = ""
        else:
            kept.id, kept.where = id_, self._run.url or str(self._folder.path.resolve() / "wandb")

    def _init(
        self, config: Mapping[str, Any], id_: str, *, mode: Literal["offline"] | None, is_online: bool
    ) -> "wandb.Run":
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, init_timeout=INIT_S, save_code=False, disable_git=True, x_disable_stats=True
        )
        job = config.get("job", {}).get("file", "")
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT") or Path(job).stem or "shoal",
            name=self._folder.name,
            id=id_,
            # Offline there is nothing to be asked whether it is there: the id alone says which run it is.
            resume="allow" if is_online else None,
            mode=mode,
            dir=str(self._folder.path.resolve()),  # the library's own process may stand in another folder
            config=dict(config),
            settings=settings,
        )

    def scalars(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Log the numbers of one step."""
        assert self._run is not None
        self._run.log({**values, "time": time_s}, step=step)

    def flush(self) -> None:
        """Return at once: the library's own process has it, and writes it to a file before it sends it."""

    def artifact(self, path: Path, name: str) -> None:
        """Keep a file with the run."""
        assert self._run is not None
        base = path
        for _ in Path(name).parts:
            base = base.parent
        self._run.save(str(path), base_path=str(base), policy="now")

    def close(self, status: str) -> None:
        """End the run there."""
        if self._run is not None:
            self._run.finish(exit_code=0 if status == "done" else 1)


def _sync(folder: RunFolder) -> str:
    """Return the command that brings a run that was kept offline to the server."""
    return f"wandb sync {shlex.quote(str(folder.path / 'wandb'))}/offline-run-*"
