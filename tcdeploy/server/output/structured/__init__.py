"""Constraints of a model's output: JSON schemas, regexes, grammars and excluded words."""
