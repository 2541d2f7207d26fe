"""Grounded Token Initialization: data, quantization, grounding, tuning, decoding, bundles."""

__version__ = "0.1.0"
