"""A model as an ONNX file: the forms that norms have there, and what a target runs best."""
