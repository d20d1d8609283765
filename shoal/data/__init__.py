"""Which samples, in which order, for whom; and loading them."""
