"""The boundary of Peri-LN as one operator: kernels for ONNX Runtime, built from csrc/, and one in Triton for torch."""
