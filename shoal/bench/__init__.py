"""shoal measured beside its peers."""
