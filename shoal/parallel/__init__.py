"""One technique a file, each on torch's own engine."""
