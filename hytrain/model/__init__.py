"""The model as an ordered list of layers, and who owns which slice of each."""
