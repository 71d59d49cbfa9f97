"""The claim about equal GPUs; see README.md."""
