"""What was asked, what this machine is, and the Plan that follows from both. Does not import torch."""
