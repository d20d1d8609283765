"""Fitting the figures of devices and links to measured steps."""
