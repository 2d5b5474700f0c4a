"""Which worker takes a request."""
