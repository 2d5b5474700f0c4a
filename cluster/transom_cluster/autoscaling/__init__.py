"""How many workers there should be: a pure policy on their load, and its place in Ray Serve's autoscaler."""
