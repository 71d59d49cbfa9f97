"""`hytrain doctor`: whether this machine is fit for offloaded training, and what to do if not."""
