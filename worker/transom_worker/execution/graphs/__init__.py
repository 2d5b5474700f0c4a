"""CUDA graphs of decode steps: sizes, capture, warm-up, and the static batch that they replay."""
