"""What tests use to expose races and failures; inert unless asked for."""
