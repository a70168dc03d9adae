"""Training of drafters: text that the target writes itself, and the small networks that learn from it."""
