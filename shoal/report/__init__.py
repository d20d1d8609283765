"""Reads run folders, and nothing else."""
