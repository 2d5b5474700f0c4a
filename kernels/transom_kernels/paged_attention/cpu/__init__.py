"""The CPU implementation of `paged_attention`: compiled kernels and their launches."""
