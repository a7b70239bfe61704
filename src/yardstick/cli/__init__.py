"""One thin module per rule of the workflow."""
