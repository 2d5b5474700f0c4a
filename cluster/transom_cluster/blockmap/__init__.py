"""The live block map: every block of every worker, in a browser."""
