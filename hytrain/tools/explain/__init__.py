"""`hytrain explain`: why k is what it is."""
