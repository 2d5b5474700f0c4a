"""Reads checkpoint tensors by their Hugging Face names, from safetensors and GGUF files, quantised or not.

`load.load_weights(files)` opens a resolved model; calling the result reads one tensor. No tensor is read before it is requested.
"""
