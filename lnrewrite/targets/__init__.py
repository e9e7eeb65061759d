"""What each target runs best: tables of norm forms, and the passes over ONNX graphs that write them."""
