"""Other projects' weights and outputs: reading them, and agreeing with them."""
