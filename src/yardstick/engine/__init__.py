"""The int4 runtime: packed weights multiplied as they are stored."""

# The module that opens what stays packed. Imported by this name where that is asked for: an edit of the engine reruns
# those results and no others.
PACKED_MODEL = "yardstick.engine.model"
