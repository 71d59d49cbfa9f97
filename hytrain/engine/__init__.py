"""What DeepSpeed sees of hytrain: the engine, the optimizer, all use of DeepSpeed's internals."""
