"""Plans for unequal GPUs: who computes and who keeps what. Plain data in and out; no torch."""
