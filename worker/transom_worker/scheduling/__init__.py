"""The scheduler: which requests run in a step and how many tokens each computes. Integers only; `step` is the contract with
ranks.
"""
