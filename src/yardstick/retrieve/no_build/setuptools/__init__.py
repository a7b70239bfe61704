"""A stand-in for setuptools that runs nothing of the package; see build_meta."""
