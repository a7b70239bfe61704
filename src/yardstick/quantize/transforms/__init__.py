"""Changes of a model that leave its function alone and make it easier to quantize, folded into its own tensors.

A transformed model is a tensor source in front of the original's, of the same architecture and stored types, so any
method quantizes it as it would the original. Each module has a `transform(source, config, settings, recipe, writer,
calibration)` that gives the new source and config: the one with the head as a tensor of its own.
"""
