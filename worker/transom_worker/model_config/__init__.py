"""A model's `config.json` as integers: layers, attention kinds, head counts, ropes, and how ranks share them. No torch."""
