"""How far a candidate is from the reference, position by position."""
