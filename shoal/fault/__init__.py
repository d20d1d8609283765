"""What breaks, and what is done about it: checkpoints, hangs, preemption, and faults made on purpose."""
