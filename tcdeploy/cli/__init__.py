"""The command line: `app` imports the module of the command that runs; only `display` imports rich."""
