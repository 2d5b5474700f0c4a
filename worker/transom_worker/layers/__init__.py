"""Building blocks that models share."""
