"""Markdown tables that are printed while they grow."""


def print_head(*columns: str) -> None:
    """Print the names of the columns: the first is of text, the others are of numbers."""
    print_row(*columns)
    print_row("---", *["---:"] * (len(columns) - 1))


def print_row(*cells: str) -> None:
    """Print one row, at once."""
    print("| " + " | ".join(cells) + " |", flush=True)
