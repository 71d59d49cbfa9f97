"""What a training step takes, from what its layers take: for training, `explain` and plans."""
