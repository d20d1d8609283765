"""How batches come about: which samples, gathered by whom, into which memory."""
