"""k solved at run time, beside every fixed k."""
