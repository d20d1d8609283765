"""One run from the inside: state, step, loop, metrics."""
