"""What a model is called with: inputs that are made up or given, and batches of DATA."""
