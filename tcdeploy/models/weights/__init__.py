"""Weight files: where they are, what is in them, and how they reach the device."""
