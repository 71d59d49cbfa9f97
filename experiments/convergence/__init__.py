"""Loss curves of hytrain beside DeepSpeed's and torch's, and of moments in fewer bytes."""
