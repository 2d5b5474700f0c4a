"""A model's answer in its own markup: reasoning, message and tool calls, as a parser reads them and a grammar allows them."""
