"""Turns logits into token ids: penalties, filters, Gumbel noise, log-probabilities."""
