"""How much memory a worker needs, what it is made of, and whether it fits."""
