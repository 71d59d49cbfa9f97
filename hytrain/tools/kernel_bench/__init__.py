"""`hytrain bench kernel`: compares the CPU passes with what they compete with."""
