"""Answers: how output events are read in the model's markup, and written as responses, streamed chunks and errors."""
