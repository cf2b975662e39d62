"""Private names of Inductor."""
