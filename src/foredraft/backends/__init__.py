"""What runs the target, and draft models: one contract (`base`), several engines."""
