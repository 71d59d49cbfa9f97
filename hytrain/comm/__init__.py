"""Collectives over equal and unequal shards."""
