"""The int4 runtime: packed weights multiplied as they are stored."""
