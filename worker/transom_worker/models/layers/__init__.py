"""Layers that models share: attention, linear layers, feed-forward layers, experts, norms, rotary embedding, and the forward
batch.
"""
