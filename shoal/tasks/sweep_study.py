"""The trials of a sweep on disk: Optuna's study in a journal, opened, mended after a crash, and read.

The journal is a file of JSON lines that processes of several nodes append to under a lock made of a link, which works
over NFS. Nothing in it is a pickle, but for the sampler cmaes, which keeps its own state so: a journal of somebody
else is refused with that one.
"""

import functools
import importlib.util
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import optuna

STUDY = "sweep"
JOURNAL = "journal.jsonl"
SAMPLERS = ("tpe", "random", "grid", "cmaes")
PRUNERS = ("median", "hyperband", "none")
# What is noted under these names with a trial, or with the study.
FAILED, CUT_OFF, EXHAUSTED, TASK = "shoal: failed", "shoal: cut off", "shoal: nothing is left to try", "shoal: task"
VAIN = 5
"""So many failures, without one trial that has a result, end a sweep: the next would fail, too."""
_LOCK_GRACE_S = 10  # a lock whose holder was killed is taken away after this; it is held for milliseconds


@dataclass(frozen=True, kw_only=True)
class Search:
    """How a sweep chooses what to try, and what it gives up early."""

    sampler: str = "tpe"
    pruner: str = "median"
    is_maximized: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for flag, name, known in (("--sampler", self.sampler, SAMPLERS), ("--pruner", self.pruner, PRUNERS)):
            if name not in known:
                raise ConfigError(f"{flag} {name!r} is none.{did_you_mean(name, list(known))}")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed {self.seed}: give a number from 0 to 4294967295.")

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """Return minimize or maximize."""
        return "maximize" if self.is_maximized else "minimize"


def need_optuna(sampler: str) -> None:
    """Raise ConfigError where what `sampler` needs is not installed."""
    for package in ("optuna", "cmaes") if sampler == "cmaes" else ("optuna",):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"a sweep needs the package {package}. Install it: pip install 'shoal[sweep]'")


def open_study(folder: Path, search: Search, *, index: int = 0) -> "optuna.Study":
    """Return the sweep of `folder`, made where there is none, with samplers that are seeded for task `index`."""
    need_optuna(search.sampler)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    journal = folder.resolve() / JOURNAL
    if search.sampler == "cmaes" and journal.exists() and journal.stat().st_uid != os.getuid():
        raise ConfigError(f"--sampler cmaes would unpickle what another user wrote to {journal}. Use --sampler tpe.")
    journal.touch()
    storage, pruner, sampler = _storage(journal, journal.stat().st_ino), _pruner(search.pruner), _sampler(search, index)
    try:
        study = optuna.load_study(study_name=STUDY, storage=storage, sampler=sampler, pruner=pruner)
    except KeyError:
        study = optuna.create_study(
            study_name=STUDY, storage=storage, sampler=sampler, pruner=pruner, direction=search.direction
        )
    if study.direction.name.lower() != search.direction:
        flag = "without" if search.is_maximized else "with"
        raise ConfigError(f"the sweep in {folder} is to {study.direction.name.lower()}. Go on {flag} --maximize.")
    return study


def mend(folder: Path) -> None:
    """Cut off what a crash has left of a line at the end of the journal. For who has the sweep for themselves."""
    journal = folder / JOURNAL
    if not journal.exists() or not journal.stat().st_size:
        return
    with journal.open("rb+") as file:
        data = file.read()
        if not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)


def make_up(study: "optuna.Study", *, reason: str, task: int | None = None) -> int:
    """Mark the running trials failed, or the one of `task`, for this `reason`, and put the same in line again.

    Returns how many there were.
    """
    from optuna.trial import TrialState

    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    lost = [trial for trial in running if task is None or trial.user_attrs.get(TASK) == task]
    for trial in lost:
        give_up(study, trial.number, reason)
        study.enqueue_trial(trial.params, user_attrs={"shoal: made up for": trial.number})
    return len(lost)


def is_exhausted(study: "optuna.Study") -> bool:
    """Return whether a grid has been tried to its end, and nothing that was cut off waits to be tried again."""
    from optuna.trial import TrialState

    if not study.user_attrs.get(EXHAUSTED):
        return False
    return not study.get_trials(deepcopy=False, states=(TrialState.WAITING,))


def is_vain(study: "optuna.Study", *, first: int) -> bool:
    """Return whether `VAIN` trials of the tasks from `first` on have failed, and none of any has a result."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    if any(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials):
        return False
    failed = [trial for trial in trials if trial.state == TrialState.FAIL and trial.user_attrs.get(TASK, -1) >= first]
    return len(failed) >= VAIN


def give_up(study: "optuna.Study", number: int, reason: str) -> None:
    """Mark trial `number` failed, which nobody runs any more and which has not ended by itself."""
    from optuna.trial import TrialState

    study.set_user_attr(f"{CUT_OFF} {number}", reason)
    study.tell(number, state=TrialState.FAIL, skip_if_finished=True)


def why_failed(study_notes: dict[str, Any], trial: "optuna.trial.FrozenTrial") -> str:
    """Return why `trial` failed; "" if it did not. `study_notes` are the study's user attributes."""
    return str(trial.user_attrs.get(FAILED) or study_notes.get(f"{CUT_OFF} {trial.number}", ""))


@functools.lru_cache(maxsize=1)
def _storage(journal: Path, _: int) -> "optuna.storages.JournalStorage":
    """Return the storage that the file is. A warm process keeps it, and reads only what is new."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    lock = JournalFileSymlinkLock(str(journal), grace_period=_LOCK_GRACE_S)
    return optuna.storages.JournalStorage(JournalFileBackend(str(journal), lock_obj=lock))


def _sampler(search: Search, index: int) -> "optuna.samplers.BaseSampler":
    import optuna

    seed = None if search.seed is None else _seed(search.seed, index)
    if search.sampler == "random":
        return optuna.samplers.RandomSampler(seed)
    if search.sampler == "cmaes":
        return optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    if search.sampler == "grid":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.BruteForceSampler(seed)
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)  # running trials count: none is tried twice


def _seed(seed: int, index: int) -> int:
    """Return a seed for each task, so that what one trial draws depends neither on which process runs it nor on how
    much others have drawn."""
    import numpy as np

    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


def _pruner(name: str) -> "optuna.pruners.BasePruner":
    import optuna

    makers: dict[str, Any] = {
        "median": optuna.pruners.MedianPruner,
        "hyperband": optuna.pruners.HyperbandPruner,
        "none": optuna.pruners.NopPruner,
    }
    pruner: optuna.pruners.BasePruner = makers[name]()
    return pruner
