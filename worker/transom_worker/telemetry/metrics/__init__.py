"""A worker's Prometheus metrics: requests, tokens, steps, ranks, and every block by group and state.

Histograms and counters of requests, tokens and steps are updated as the engine's events arrive, on its thread. A scrape reads all
other values from the last published `WorkerState`, so that they cost a step nothing. Any thread may scrape.
"""
