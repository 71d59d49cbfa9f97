"""ZeRO-3: sharded weights, and weights that stay in host memory."""
