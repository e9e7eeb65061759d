"""ONNX graphs: read, lifted, edited, translated to, run by ONNX Runtime."""
