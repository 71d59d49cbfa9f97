"""Commands on checkpoints: what is in them, are they whole, weights out of them."""
