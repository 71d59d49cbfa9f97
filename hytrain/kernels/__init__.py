"""Adam and norms as passes over memory; knows tensors and addresses, no threads, no queues."""
