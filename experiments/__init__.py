"""Short runnable scripts: parse a config, call the library, write results."""
