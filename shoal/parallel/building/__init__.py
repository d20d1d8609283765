"""A model without its memory, and the numbers of one slice after the other."""
