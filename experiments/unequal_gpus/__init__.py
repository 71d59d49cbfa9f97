"""Claims about GPUs made unequal; see README.md."""
