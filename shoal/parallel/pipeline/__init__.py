"""Pipeline parallelism: layers cut into stages, micro-batches sent through them."""
