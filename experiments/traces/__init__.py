"""What traces of real runs say, held against what the runs then do."""
