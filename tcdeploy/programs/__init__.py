"""Regions of the model, the programs compiled for them, and the statistics of compilations and cache hits."""
