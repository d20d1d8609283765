"""First on the path of processes that import timm beside a torch for processors: see benchmarks/families_timm.py."""

from benchmarks.families_timm import declare_operators

declare_operators()
