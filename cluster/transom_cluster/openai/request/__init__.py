"""Parses and checks request bodies, and reads from them the sampling parameters, the prompt, and the options of the answer."""
