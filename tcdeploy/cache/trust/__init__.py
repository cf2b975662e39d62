"""Whom a cache may come from: signatures of bundles, and the owners of folders."""
