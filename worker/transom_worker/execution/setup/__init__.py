"""Sets a rank's model up: finds and loads it, sizes and allocates its KV pool, and warms it up. `model_setup` has the order."""
