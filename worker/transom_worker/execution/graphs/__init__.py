"""CUDA graphs of decode steps: their sizes, their input arrays, capturing and replaying them, and checking them at start-up."""
