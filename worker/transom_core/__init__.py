"""What routers and workers both speak: requests and events, settings, a model as integers, its text, grammars, cache rules, errors.

Nothing here imports torch, Ray or numba, so that a router starts in a second and stays small.
"""

__version__ = "0.1.0"
