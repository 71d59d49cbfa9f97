"""Moments of each kind on one GPU and its host."""
