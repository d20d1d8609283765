"""The few loops that Python is too slow for, in C; beside each stands torch or NumPy that says the same."""
