"""Slurm: what is submitted, every call of its programs, and what differs from site to site."""
