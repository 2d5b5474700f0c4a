"""The cluster: requests in, tokens out; never imports torch."""

__version__ = "0.1.0"
