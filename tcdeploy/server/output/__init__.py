"""Parsers of a model's output: text, reasoning and tool calls."""
