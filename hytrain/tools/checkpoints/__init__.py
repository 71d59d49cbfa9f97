"""Commands on checkpoints: say what is in them, verify that they are whole, export weights."""
