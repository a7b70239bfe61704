"""Rivals: the same reference in other people's formats, made by their own quantizers."""
