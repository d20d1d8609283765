"""Packs: a dataset in a few big files, written once, made to be mapped into memory and read at random."""
