"""(run folder) -> processes."""
