"""Commands beside training; training imports nothing of this folder."""
