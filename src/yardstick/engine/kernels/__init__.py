"""Triton kernels for packed weights, and the plain torch twins that say what they compute.

Importing them needs triton and no GPU; with TRITON_INTERPRET=1 in the environment they run on the CPU, slowly.
"""
