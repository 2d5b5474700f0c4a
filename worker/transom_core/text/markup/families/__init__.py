"""The markups of the model families, one file each: how tool calls are written, read and constrained."""
