"""What this machine is: devices, cores, and the ranks that share them."""
