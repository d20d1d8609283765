"""Many independent tasks: a pool of warm workers here, few jobs of sensible length on a cluster."""
