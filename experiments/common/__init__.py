"""What the experiments share: models, measured systems, processes, timing, reports."""
