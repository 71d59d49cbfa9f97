"""Commands other than training; training imports nothing from this folder."""
