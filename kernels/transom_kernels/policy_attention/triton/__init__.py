"""The GPU implementation of `policy_attention`, attention of rows with a KV policy: Triton kernels and their launches."""
