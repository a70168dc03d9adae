"""The small networks that draft from what the target has computed, and their files."""
