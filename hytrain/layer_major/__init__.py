"""Gradient accumulation layer by layer: all micro-batches pass through a block before the next."""
