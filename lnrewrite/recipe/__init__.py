"""What ships inside a rewritten checkpoint folder: torch and the standard library, and nothing of ours."""
