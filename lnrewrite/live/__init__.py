"""A living module rewritten in place, and saved as what it is."""
