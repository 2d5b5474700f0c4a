"""The CPU implementation of `policy_attention`, attention of rows with a KV policy: compiled kernels and their launches."""
