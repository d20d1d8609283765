"""How gradients meet, one mode a file."""
