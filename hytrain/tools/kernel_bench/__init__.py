"""`hytrain bench kernel`: the CPU passes beside what they compete with."""
