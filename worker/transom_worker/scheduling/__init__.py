"""The scheduler: which requests run in a step and how many tokens each computes. Integers only, no tensors.

`step` has the messages between the scheduler and the ranks (the processes that compute).
"""
