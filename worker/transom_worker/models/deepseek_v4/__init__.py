"""DeepSeek V4: latent attention over a window and compressed entries, hyper-connections, hash-routed experts."""
