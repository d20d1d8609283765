"""DeepSpeed as the engine of a plan: its configuration, its start, and what each worker holds of a model under it."""
