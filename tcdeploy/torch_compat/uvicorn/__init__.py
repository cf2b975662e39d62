"""Private names of uvicorn."""
