"""Writes nets for stock MXNet and ONNX Runtime."""
