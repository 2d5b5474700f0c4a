"""What `transom` does in a terminal: one module a command, and what they share."""
