"""Where the numbers of a run go beside its own folder: one file a logger, one contract (logger.py)."""
