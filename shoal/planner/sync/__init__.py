"""How often, and by whom, gradients meet where that is not all-reduce at every step."""
