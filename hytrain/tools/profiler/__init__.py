"""Measuring: the CPU kernel, layers on real steps, GPU profiles."""
