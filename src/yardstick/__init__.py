"""Yardstick: how far is a quantized language model from its bf16 original?"""

__version__ = "0.1.0"
