"""The picture: a residual network as streams and blocks, its text, and the edits that passes make of it."""
