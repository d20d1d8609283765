"""Every logger against one suite, with its real library: what is given to it is read back from where it went."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder
from shoal.spec.record import LOGGERS as NAMES
from shoal.spec.record import read_loggers
from shoal.training.loggers.delivery import Delivery
from shoal.training.loggers.logger import Kept
from shoal.training.loggers.registry import LOGGERS, check_loggers, config_of
from tests.support.curves import about
from tests.support.mlflow_server import free_port
from tests.support.runs import make_run
from tests.support.tensorboard_file import shown
from tests.support.wandb_file import read_offline

pytestmark = pytest.mark.filterwarnings("ignore")  # of the loggers' own libraries


class Seen(Protocol):
    """What a logger shows of the run in a folder."""

    def curve(self, name: str) -> list[tuple[int, float]]: ...
    def latest(self) -> Mapping[str, float]: ...
    def config(self) -> Mapping[str, str]: ...
    def files(self) -> set[str]: ...


class SeenTensorBoard:
    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def curve(self, name: str) -> list[tuple[int, float]]:
        return shown(self._folder.tensorboard)[0].get(name, [])

    def latest(self) -> Mapping[str, float]:
        return {name: curve[-1][1] for name, curve in shown(self._folder.tensorboard)[0].items()}

    def config(self) -> Mapping[str, str]:
        return {
            f"{name.partition('/')[0]}.{field}": str(value)
            for name, text in shown(self._folder.tensorboard)[1].items()
            for field, value in json.loads(text).items()
        }

    def files(self) -> set[str]:
        return {path.name for path in self._folder.path.iterdir()}  # beside the scalars


class SeenWandB:
    def __init__(self, folder: RunFolder) -> None:
        import wandb

        wandb.teardown()  # its own process writes the last of a file when it ends
        self.ids, self._values, self._config, self._files = read_offline(folder.path)
        assert len(self.ids) == 1, "one run, however often it was started"

    def curve(self, name: str) -> list[tuple[int, float]]:
        return [(step, values[name]) for step, values in sorted(self._values.items()) if name in values]

    def latest(self) -> Mapping[str, float]:
        return self._values[max(self._values)]

    def config(self) -> Mapping[str, str]:
        tables = {name: table for name, table in self._config.items() if isinstance(table, dict)}
        return {f"{name}.{field}": str(value) for name, table in tables.items() for field, value in table.items()}

    def files(self) -> set[str]:
        return self._files


class SeenMLflow:
    def __init__(self, folder: RunFolder) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        self._id = Kept.read(folder, "mlflow").id
        [experiment] = [e for e in self._client.search_experiments() if e.name == folder.path.parent.name]
        assert [run.info.run_id for run in self._client.search_runs([experiment.experiment_id])] == [self._id]

    def curve(self, name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self._client.get_metric_history(self._id, name)]

    def latest(self) -> Mapping[str, float]:
        metrics: Mapping[str, float] = self._client.get_run(self._id).data.metrics
        return metrics

    def config(self) -> Mapping[str, str]:
        run = self._client.get_run(self._id)
        return run.data.params | {f"tag {name}": value for name, value in run.data.tags.items()}

    def files(self) -> set[str]:
        return {each.path for each in self._client.list_artifacts(self._id)}

    def delete(self) -> None:
        self._client.delete_run(self._id)

    @property
    def status(self) -> str:
        return str(self._client.get_run(self._id).info.status)


SEEN: dict[str, type[Any]] = {"tensorboard": SeenTensorBoard, "wandb": SeenWandB, "mlflow": SeenMLflow}


@pytest.fixture
def where(mlflow_address: str, fresh_wandb: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs go; loggers are set up for it."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_address)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", tmp_path.name)
    return tmp_path


def begin(folder: RunFolder, name: str) -> tuple[Any, Kept]:
    """Start the logger as a run does that begins or goes on."""
    logger, kept = LOGGERS[name](folder), Kept.read(folder, name)
    logger.start(config_of(folder), kept)
    kept.write(folder, name)
    return logger, kept


@pytest.mark.parametrize("name", LOGGERS)
def test_numbers_settings_and_files_arrive_and_a_second_start_continues_the_same_curve(name: str, where: Path) -> None:
    folder = make_run(where, steps=3)
    logger, kept = begin(folder, name)
    for step in range(1, 6):
        logger.scalars(step, 1000.0 + step, {"loss": 1 / step, "seconds/data": 0.25})
    logger.scalars(5, 1005.5, {"eval/accuracy": 0.5})
    logger.flush()
    kept.step = 4 if name == "tensorboard" else 5  # step 5 is done again; TensorBoard alone can forget it
    kept.write(folder, name)
    logger.close("stopped")

    logger, kept = begin(folder, name)
    for step in range(kept.step + 1, 9):
        logger.scalars(step, 1010.0 + step, {"loss": 1 / step})
    logger.flush()
    for file in ("plan.toml", "run.toml"):
        logger.artifact(folder.path / file, file)
    logger.close("done")

    seen: Seen = SEEN[name](folder)
    assert seen.curve("loss") == about((step, 1 / step) for step in range(1, 9))
    assert [step for step, _ in seen.curve("seconds/data")] == list(range(1, kept.step + 1))
    assert seen.curve("eval/accuracy") == ([] if name == "tensorboard" else [(5, 0.5)])
    assert seen.config()["job.batch_size"] == "8"
    assert any(field.startswith("plan.mesh") for field in seen.config())
    assert {"plan.toml", "run.toml"} <= seen.files()


@pytest.mark.parametrize("name", LOGGERS)
def test_numbers_arrive_whatever_they_are_called_each_under_a_name_of_its_own(name: str, where: Path) -> None:
    called = ["top@5", "top#5", "top_5", "f1 (macro)", "acc%", "../x", "..", "..x", "/x", "x/", "a//b", "é"]
    called += ["x" * 250, "x" * 300, "x" * 299 + "y"]
    logger, _ = begin(make_run(where, steps=1), name)
    for step in (1, 2):
        logger.scalars(step, 1000.0 + step, {each: step * (3.0 + i) for i, each in enumerate(called)})
        logger.flush()
    logger.close("done")
    latest = SEEN[name](RunFolder.open(where / "gpt-1")).latest()
    assert {2 * (3.0 + i) for i in range(len(called))} <= set(latest.values())
    assert {"top_5", "é", "x" * 250} <= set(latest), "names that every logger takes stay as they are"


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_run_is_delivered_from_its_folder_once_and_what_comes_later_is_added(name: str, where: Path) -> None:
    folder = make_run(where, steps=6, status=None)
    said: list[str] = []
    delivery = Delivery(folder, name, say=said.append)
    delivery.advance()
    delivery.advance()
    with folder.events_of(0).open("a") as file:
        line = {"kind": "step", "time": 1007.0, "step": 7, "loss": 0.5, "batch_weight": 80, "step_s": 0.5}
        file.write(json.dumps(line) + "\n" + json.dumps(line | {"step": 8, "time": 1007.01, "loss": 0.25}) + "\n")
        file.write(json.dumps({"kind": "log", "time": 1007.02, "step": 8, "values": {"mine": 3.0}}) + "\n{cut off")
    folder.write_result("failed", "for a test")
    assert delivery.finish()
    assert Delivery(folder, name, say=said.append).finish(), "once more, for nothing"
    assert said == []
    seen: Seen = SEEN[name](folder)
    # Step 8 came 0.01 s after step 7, and would not be shown if it were not the last.
    assert seen.curve("loss") == about([*((step, 4 / step) for step in range(1, 7)), (7, 0.5), (8, 0.25)])
    assert seen.curve("tokens_per_s")[-1] == (8, 160.0)
    assert seen.curve("eval/accuracy") == about([(6, 0.3)])
    assert seen.curve("mine") == [(8, 3.0)]
    assert {"plan.toml", "job.toml", "cluster.toml"} <= seen.files()
    if isinstance(seen, SeenMLflow):
        assert seen.status == "FAILED"


def test_a_server_that_is_gone_is_said_once_and_gets_everything_when_it_is_back(
    where: Path, mlflow_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.training.loggers.delivery.AGAIN_S", 0.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    folder = make_run(where, steps=4)
    said: list[str] = []
    delivery = Delivery(folder, "mlflow", say=said.append)
    delivery.advance()
    delivery.advance()
    assert not delivery.finish()
    assert [line.split(":")[0] for line in said] == [
        "mlflow does not take the run's numbers",
        "mlflow has the run up to step 0. The rest later",
    ]
    assert "shoal log" in said[-1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_address)
    assert delivery.finish()
    assert [step for step, _ in SeenMLflow(folder).curve("loss")] == [1, 2, 3, 4]


def test_a_run_that_is_deleted_while_it_goes_begins_anew_with_its_first_step(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.training.loggers.delivery.AGAIN_S", 0.0)
    folder = make_run(where, steps=3, status=None)
    said: list[str] = []
    delivery = Delivery(folder, "mlflow", say=said.append)
    delivery.advance()
    deleted = Kept.read(folder, "mlflow").id
    SeenMLflow(folder).delete()
    with folder.events_of(0).open("a") as file:
        line = {"kind": "step", "time": 1004.0, "step": 4, "loss": 0.5, "batch_weight": 80, "step_s": 0.5}
        file.write(json.dumps(line) + "\n")
    delivery.advance()
    delivery.advance()
    assert Kept.read(folder, "mlflow").id != deleted
    assert [step for step, _ in SeenMLflow(folder).curve("loss")] == [1, 2, 3, 4]
    assert [line.split(":")[0] for line in said] == [
        "mlflow does not take the run's numbers",
        "mlflow answers again, and has all up to step 4.",
    ]


def test_one_process_at_a_time_brings_a_run_to_a_logger(where: Path) -> None:
    folder = make_run(where, steps=3)
    said: list[str] = []
    first, second = (Delivery(folder, "mlflow", say=said.append) for _ in range(2))
    first.advance()
    assert not second.finish()
    assert "another process brings gpt-1 to mlflow just now" in said[0]
    assert first.finish()
    assert second.finish(), "and the other goes on from there"
    assert [step for step, _ in SeenMLflow(folder).curve("loss")] == [1, 2, 3]


def test_settings_that_changed_when_a_run_went_on_are_tags_of_mlflow(where: Path) -> None:
    folder = make_run(where, steps=2, workers=2)
    assert Delivery(folder, "mlflow", say=print).finish()
    folder.plan_toml.write_text(folder.plan_toml.read_text().replace("replicate = 2", "replicate = 3"))
    assert Delivery(folder, "mlflow", say=print).finish()
    config = SeenMLflow(folder).config()
    assert config["plan.mesh.replicate"] == "2"
    assert config["tag plan.mesh.replicate"] == "3"


def test_loggers_are_named_in_a_list_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_loggers("wandb, tensorboard,wandb") == ("wandb", "tensorboard")
    assert read_loggers(["mlflow"]) == ("mlflow",)
    assert read_loggers("none") == read_loggers([]) == ()
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        read_loggers("tensorbord")
    assert tuple(LOGGERS) == NAMES
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI is not set"):
        check_loggers(("mlflow",))
    monkeypatch.setattr("shoal.training.loggers.registry.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[wandb\]'"):
        check_loggers(("wandb",))
