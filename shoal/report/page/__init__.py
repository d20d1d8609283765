"""The pages about a run, two runs, and a sweep: each one file that opens offline."""
