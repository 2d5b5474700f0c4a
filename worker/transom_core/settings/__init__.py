"""Settings as a user gives them: flags, YAML and `LLM(...)` arguments, checked and with their units."""
