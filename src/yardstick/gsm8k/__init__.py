"""Grade-school arithmetic in words: what a quantizer does to answers, beside what it does to distributions."""
