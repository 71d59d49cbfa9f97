"""Checkpoints: DeepSpeed's universal format, written and read by all ranks in parallel."""
