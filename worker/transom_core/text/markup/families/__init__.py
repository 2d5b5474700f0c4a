"""The tool call markups of the model families, one file per family or notation: how calls are written, read and constrained.

Each file begins with the names of its parsers, which `--tool-call-parser` takes.
"""
