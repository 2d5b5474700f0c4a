"""A model's `config.json` as dataclasses of integers: layers, attention, heads, RoPE, and how ranks share them. No torch."""
