"""How long a step takes: computing, messages, the pipeline's bubble."""
