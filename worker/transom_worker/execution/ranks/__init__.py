"""Tensor-parallel ranks as processes or Ray actors: starting them, messages to them, and noticing a lost one."""
