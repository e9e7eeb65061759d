"""A model with its picture: captured from torch, or read from ONNX."""
