"""For authors of passes: a machine that runs pictures in float64, and edits carried out on it."""
