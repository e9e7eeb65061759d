"""OUT: looked at before anything runs, and landed whole or not at all."""
