"""The thread that runs the engine beside an event loop."""
