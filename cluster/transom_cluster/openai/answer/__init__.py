"""Answers: parses output events in the model's markup, and writes them as responses, streamed chunks and errors."""
