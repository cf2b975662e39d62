"""From Recipe, Environment and Architecture to the Plan. Does not import torch."""
