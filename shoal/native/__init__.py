"""The few loops that Python is too slow for, in C; beside each stands a version in torch or NumPy that says the same."""
