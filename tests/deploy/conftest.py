"""Fixtures of the server's tests, for the recipes that are compared with a running server."""

from tests.server.conftest import prepared_fork_server, serve, server, warm_cache  # noqa: F401 - fixtures
