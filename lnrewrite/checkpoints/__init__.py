"""A checkpoint folder in, a checkpoint folder out, its weights read and written one at a time."""
