"""Layers that models share: attention, linear and feed-forward layers, experts, norms, rotary embedding; and the forward batch."""
