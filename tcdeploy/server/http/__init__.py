"""The HTTP side: connections, limits, parsing, errors, and the description of the API."""
