"""The command line: `app` registers one module per command, and `display` is the only module that imports rich."""
