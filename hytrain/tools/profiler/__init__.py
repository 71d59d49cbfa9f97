"""`hytrain profile`: measures GPUs, hosts and collectives with a model, for plans."""
