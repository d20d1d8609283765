"""MLflow, by the client of its own library: mlflow-skinny is enough.

1. MLFLOW_TRACKING_URI says where: the address of a server, or a folder or database that MLflow keeps. The experiment is
   MLFLOW_EXPERIMENT_NAME; without it, the job file's name.
2. The id of the run is kept in the run folder: one that goes on is the same run there. Parameters cannot be changed in
   MLflow: what is otherwise when a run goes on, such as the number of workers, becomes a tag.
3. A number whose name MLflow refuses, such as "top@5", has the nearest name that it takes: one that is refused would
   take all others of its request with it, for ever.
4. Requests that fail are not tried for minutes by the library (its default), but later, by who calls this.
"""

import os
import posixpath
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit, urlunsplit

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder
from shoal.training.loggers.logger import Kept

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Of the library, unless they are set."""
_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""In one request: what the server takes."""
_MOST_CHARACTERS = 500
"""In a parameter: what servers of any version take."""
_MOST_NAME = 250
"""Characters in the name of a number."""
_REFUSED = re.compile(r"[^/\w.\- :]")
_STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "unfinished": "KILLED"}


class MLflow:
    """A run of MLflow."""

    is_apart: ClassVar[bool] = True

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._id = ""
        self._waiting: list[Metric] = []

    @staticmethod
    def check() -> None:
        """Raise ConfigError where nobody has said which server to log to."""
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise ConfigError(
                "log 'mlflow': MLFLOW_TRACKING_URI is not set. Set it to the address of your MLflow server, such as "
                "http://localhost:5000"
            )

    def start(self, config: Mapping[str, Any], kept: Kept) -> None:
        """Begin the run, or go on with it."""
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient()
        run = self._find(kept.id) if kept.id else None
        if run is None:
            job = config.get("job", {}).get("file", "")
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or Path(job).stem or "shoal"
            run = self._client.create_run(self._experiment(name), run_name=self._folder.name)
            # One that was deleted there is logged anew, from its first step.
            kept.id, kept.step, kept.is_whole = run.info.run_id, 0, False
        else:
            self._client.update_run(kept.id, status="RUNNING")
        self._id = kept.id
        kept.where = f"{_address()}/#/experiments/{run.info.experiment_id}/runs/{kept.id}"
        self._write_config(dict(_flat(config)), run.data.params)

    def _find(self, id_: str) -> "Run | None":
        """Return the run, or None if it is not there any more."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(id_)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _write_config(self, fields: dict[str, str], there: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        params = [Param(name, value) for name, value in fields.items() if name not in there]
        tags = [RunTag(name, value) for name, value in fields.items() if there.get(name, value) != value]
        for first in range(0, max(len(params), len(tags)), _MOST_PARAMS):
            part = slice(first, first + _MOST_PARAMS)
            self._client.log_batch(self._id, params=params[part], tags=tags[part])

    def scalars(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Note the numbers of one step, for `flush`."""
        from mlflow.entities import Metric

        self._waiting += [Metric(_taken(name), value, int(1000 * time_s), step) for name, value in values.items()]

    def flush(self) -> None:
        """Send what was noted; what could not be sent is given up, for the caller has it."""
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=waiting[first : first + _MOST_METRICS])

    def artifact(self, path: Path, name: str) -> None:
        """Send a file."""
        folder = str(Path(name).parent)
        self._client.log_artifact(self._id, str(path), None if folder == "." else folder)

    def close(self, status: str) -> None:
        """Say how the run has ended."""
        self._client.set_terminated(self._id, status=_STATUS[status])


def _address() -> str:
    """Return where the runs are, without a password that may stand in it."""
    parts = urlsplit(os.environ["MLFLOW_TRACKING_URI"])
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/")


def _taken(name: str) -> str:
    """Return `name` as MLflow takes it. One that is changed ends in its own checksum: two never become the same."""
    taken = _REFUSED.sub("_", name)
    if posixpath.normpath(taken) != taken or taken == "." or taken.startswith(("/", "..")):  # it may be a file's there
        taken = taken.replace("/", "_").lstrip(".")
    if name and taken == name and len(name) <= _MOST_NAME:
        return name
    ending = f"-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
    return taken[: _MOST_NAME - len(ending)] + ending


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of nested tables as ("plan.mesh.shard", "2")."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", str(value)[:_MOST_CHARACTERS]
