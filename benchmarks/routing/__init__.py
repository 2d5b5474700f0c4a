"""How much prompt computation routing by prefix hits saves, and how first tokens change."""
