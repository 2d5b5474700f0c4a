"""The live block map, which shows every KV block of every worker in a browser."""
