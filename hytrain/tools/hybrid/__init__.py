"""Hybrid parallelism over unequal GPUs: pipeline stages x data x tensor parallel, planned."""
