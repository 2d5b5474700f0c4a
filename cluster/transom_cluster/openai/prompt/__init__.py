"""Prompts: messages rendered by the model's chat template, and text as tokens."""
