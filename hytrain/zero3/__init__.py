"""ZeRO-3: when sharded weights are gathered and released, and that nobody reads them meanwhile."""
