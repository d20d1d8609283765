"""A pack brought next to the compute: the fastest storage with room, one copy a node, passed on from node to node."""
