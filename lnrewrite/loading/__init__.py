"""What a MODEL is, read without running it: files, archives, checkpoint folders."""
