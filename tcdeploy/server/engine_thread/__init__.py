"""The engine side: the thread that runs the engine."""
