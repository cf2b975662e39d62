"""Figures of the server: metrics, status, logs and traces."""
