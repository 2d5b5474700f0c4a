"""The host: which cores threads use, how OpenMP threads wait, which GPUs there are, and how much memory is left."""
