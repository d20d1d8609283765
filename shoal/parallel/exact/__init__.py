"""Layers that look at chance or at the whole batch, made independent of the number of workers."""
