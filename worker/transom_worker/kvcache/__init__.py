"""Integers only: who owns which block of which KV cache group."""
