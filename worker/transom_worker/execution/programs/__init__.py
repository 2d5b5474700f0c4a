"""Decode steps on CPUs as recorded programs, which run without the model's Python code."""
