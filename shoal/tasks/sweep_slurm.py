"""A sweep on a cluster: its trials are the tasks of a map, in a few Slurm jobs (slurm.py).

1. A round has as many tasks as trials are left. Each asks the journal for a trial when its turn comes, so that it is
   chosen by what is known by then; which tasks there are does not depend on that.
2. The round is noted with the study. If this side is killed, the jobs go on; started again, it goes on with the round.
3. When a round is over, nobody runs: trials that have not ended were cut off, and are made up for in a next one.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from shoal.tasks.map import map as run_map
from shoal.tasks.submitting import SlurmOptions
from shoal.tasks.sweep import Sweep, alone, open_sweep, result_of, task_of
from shoal.tasks.sweep_result import SweepResult, refuse_vain
from shoal.tasks.sweep_study import is_exhausted, make_up, mend
from shoal.tasks.sweep_trial import Task, run_trial

if TYPE_CHECKING:
    import optuna

_ROUND = "shoal: round"


def run_sweep_on_slurm(
    sweep: Sweep, options: SlurmOptions, *, at_once: int | None = None, progress: bool | None = None
) -> SweepResult:
    """Run trials in jobs of Slurm until as many are done as were asked for, and return what came of the sweep.

    `at_once` is how many may run at once; None: as many as a few jobs have room for.
    """
    with alone(sweep.folder):
        study = open_sweep(sweep)
        done = -1
        try:
            while (tasks := _round(study, sweep)) and done < result_of(study, sweep).done:
                done = result_of(study, sweep).done
                folder = sweep.folder / f"round-{study.user_attrs[_ROUND]['number']}"
                run_map(
                    run_trial,
                    tasks,
                    folder=folder,
                    workers=at_once,
                    slurm=dataclasses.replace(options, code=sweep.file),
                    on_error="return",
                    progress=progress,
                )
                _close(study)
                if not make_up(study, reason="its job ended before it did"):
                    break  # what raised is not tried again until the sweep is started again
        finally:
            result_of(study, sweep).write()
        refuse_vain(result_of(study, sweep))
        return result_of(study, sweep)


def _round(study: "optuna.Study", sweep: Sweep) -> list[Task]:
    """Return the tasks of the round that is open, or of a new one; none if nothing is left."""
    noted: dict[str, Any] = study.user_attrs.get(_ROUND, {"number": 0, "is_open": False})
    if not noted["is_open"]:
        mend(sweep.folder)
        make_up(study, reason="it was running when the sweep was cut off")
        left = sweep.trials - result_of(study, sweep).done
        if left <= 0 or is_exhausted(study):
            return []
        first = len(study.get_trials(deepcopy=False))
        noted = {"number": noted["number"] + 1, "is_open": True, "first": first, "count": left}
        study.set_user_attr(_ROUND, noted)
    first = noted["first"]
    return [task_of(sweep, index, first=first) for index in range(first, first + noted["count"])]


def _close(study: "optuna.Study") -> None:
    study.set_user_attr(_ROUND, study.user_attrs[_ROUND] | {"is_open": False})
