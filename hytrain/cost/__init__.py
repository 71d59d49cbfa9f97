"""Predicts a step's time from its layers' times: for training, `explain` and plans."""
