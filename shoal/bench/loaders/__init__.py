"""Loaders measured side by side on the user's own data: `shoal bench loaders`."""
