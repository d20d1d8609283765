"""A run while it goes, read from its folder: drawn in the terminal, as plain lines, or on a local web page."""
