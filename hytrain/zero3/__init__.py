"""ZeRO-3: when sharded weights are gathered and released, and the guard against reads in between."""
