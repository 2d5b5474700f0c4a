"""How fast the engine is: beside other engines or another variant of itself, and kernel by kernel."""
