"""`hytrain doctor`: is this machine fit for offloaded training, and what to do where it is not."""
