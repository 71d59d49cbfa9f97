"""What layer-major accumulation costs and gains: see README.md."""
