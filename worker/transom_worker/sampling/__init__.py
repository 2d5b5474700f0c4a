"""Logits to token ids: penalties, filters, counter-based noise, log-probabilities."""
