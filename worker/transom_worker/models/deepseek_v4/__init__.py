"""DeepSeek V4: latent attention over windows and compressed entries, hyper-connections, hash-routed and routed experts."""
