"""The command line: `app` is a table of contents, one file per command, and `display` the only one that draws."""
