"""Checkpoints on disk: complete or not there, written while training goes on, read into any mesh."""
