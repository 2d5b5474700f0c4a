"""The engine of one worker: the step loop, its thread, and the output events of each request."""
