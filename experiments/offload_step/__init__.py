"""Step time of CPU-offloaded training: hytrain beside the systems a user would otherwise choose."""
