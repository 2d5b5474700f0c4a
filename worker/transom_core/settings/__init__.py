"""The settings that a user gives as flags, in YAML or as `LLM(...)` arguments: their names, defaults, limits and checks."""
