"""Cephalo's problem: the batch dealt to unequal GPUs, solved exactly."""
