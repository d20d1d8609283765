"""Trace any nn.Module on fake tensors: what it costs without running it."""
