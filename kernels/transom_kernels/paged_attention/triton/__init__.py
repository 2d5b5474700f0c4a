"""The GPU implementation of `paged_attention`: Triton kernels, their plans and their launches."""
