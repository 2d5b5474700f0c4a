"""How fast the engine is: beside other engines, beside another variant of itself, and kernel by kernel."""
