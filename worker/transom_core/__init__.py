"""What routers and workers share: requests and events, settings, a model's sizes, its text, grammars, cache rules, errors.

Nothing here imports torch, Ray or numba, so that a router starts in a second and stays small.
"""

__version__ = "0.1.0"
