"""Optimizers: Adam on the CPU, its reference, and what DeepSpeed's engine talks to."""
