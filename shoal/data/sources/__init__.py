"""Samples from what people have: one file a format, each a `Source` (source.py); `find.open_source` picks the one."""
