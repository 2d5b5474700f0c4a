"""Tensor-parallel ranks as processes or Ray actors: launching them, exchanging messages with them, and detecting a lost rank."""
