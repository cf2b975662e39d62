"""More than one process: replicas of a model on Ray Serve."""
