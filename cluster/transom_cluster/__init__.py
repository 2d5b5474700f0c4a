"""The cluster: requests in, tokens out; never imports torch."""
