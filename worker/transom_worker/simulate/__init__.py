"""Replays of request traces through the real scheduler and cache, without a model: integers only."""
