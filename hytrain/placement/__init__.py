"""Decides which layers are updated where. Plain data in, plain data out; no torch."""
