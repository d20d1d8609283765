"""shoal's own training loop."""

from collections.abc import Callable

from shoal.training.run import Run


def train_all(run: Run, *, on_step: Callable[[], None] = lambda: None) -> None:
    """Train to the end of the job, evaluating when the job says so. Called by every worker."""
    every, last = run.job.eval_every_steps, run.job.total_steps
    for batch in run.batches():
        run.advance(batch)
        on_step()
        is_due = run.step_count == last or (every is not None and run.step_count % every == 0)
        if run.job.eval_data is not None and is_due:
            run.evaluate()
