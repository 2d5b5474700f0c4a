"""Operators, a folder each: contract (op), specification (reference), fast paths."""
