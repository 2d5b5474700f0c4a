"""What happened to each request, step by step, from all processes that had to do with it."""
