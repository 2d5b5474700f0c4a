"""What the prefix cache finds when memory is short, beside simple rules."""
