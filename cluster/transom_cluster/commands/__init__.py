"""The commands of `transom` in a terminal: one module per command, and the modules that they share."""
