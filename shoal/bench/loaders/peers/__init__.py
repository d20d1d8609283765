"""One file a loader. Each is run by its own Python, which need not have shoal: they import each other and no more."""
