"""ZeRO-3: when sharded weights are gathered and released; the guard against reads in between."""
