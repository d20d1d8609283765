"""shoal's own training loop."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext

import torch.distributed as dist

from shoal.comm.torch_private import store_of
from shoal.fault import inject
from shoal.fault.preempt import Preemption, preemptible
from shoal.training.run import Run


def train_all(
    run: Run,
    *,
    on_step: Callable[[], None] = lambda: None,
    preemption: Preemption | None = None,
    leaves: Callable[[int], bool] = lambda _: False,
    owes_evaluation: bool = False,
) -> bool:
    """Train to the end of the job, evaluating when the job says so, and return True. Called by every worker.

    Raises Stopped, after a checkpoint, when `preemption` says that it is time; without one, what `run` listens to.
    Returns False after the first step upon which `leaves` says so, the same on all workers. `owes_evaluation`: that
    after the last step was not done.
    """
    inject.into(run.model, lambda: run.step_count + 1)
    if owes_evaluation:
        run.evaluate()
    with nullcontext() if run.saving.is_asked else listening(run, preemption), closing(run.batches()) as batches:
        for batch in batches:
            if leaves(run.step_count):
                return False
            inject.at("step begins", run.step_count + 1)
            run.advance(batch)
            on_step()
            if is_evaluated(run):
                run.evaluate()
    return True


def is_evaluated(run: Run) -> bool:
    """Return whether the job says to evaluate after the last step that was done."""
    if run.loose is not None and not run.loose.is_settled:
        return False
    every, last = run.job.eval_every_steps, run.job.total_steps
    is_due = run.step_count == last or (every is not None and run.step_count > 0 and run.step_count % every == 0)
    return run.job.eval_data is not None and is_due


@contextmanager
def listening(run: Run, preemption: Preemption | None = None) -> Iterator[None]:
    """Let `run` be asked to stop, after any step of `run.batches()`, for the length of a `with` block.

    Called by every worker: they stop after the same step. Without a `preemption`, it is made here.
    """
    with nullcontext(preemption) if preemption is not None else preemptible() as asked:
        # On a GPU the processor is a step ahead of what is known to be done (`Run.advance`).
        ahead = 2 if run.device.type == "cuda" else 1
        store = store_of(dist.group.WORLD) if run.rank.workers > 1 else None
        asked.meet(store, index=run.rank.index, workers=run.rank.workers, ahead=ahead)
        run.saving.listen(asked)
        try:
            yield
        finally:
            run.saving.listen(None)
