"""The markup in which models write reasoning, message and tool calls: parsers that read it, and grammars that constrain it."""
