"""Quantizers: tensors in, tensors out. Orchestration is in `sequential` and `checkpoint`."""
