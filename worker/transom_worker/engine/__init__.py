"""The engine of one worker: the step loop, its thread, and each request's output events."""
