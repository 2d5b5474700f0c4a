"""Reads a model's `config.json` into dataclasses: layers, attention, heads, RoPE, and how ranks divide them. Imports no torch."""
