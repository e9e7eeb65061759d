"""ONNX files in ONNX Runtime as users run them: sessions, and timings."""
