"""Training of drafters: text by the target itself, what its layers make of it, and what learns from that."""
