"""`linear_recurrence` and `gated_rms_norm` on CPUs."""
