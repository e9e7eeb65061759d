"""Private names of libraries, a file a library; tests/test_compat.py fails for each that moves."""
