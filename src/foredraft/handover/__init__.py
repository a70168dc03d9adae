"""Hand-over to engines for many machines: what was measured here, as configuration there, and a check of the result.

No distributed engine is built here. vLLM's keys are a table (`keys`), checked without vLLM being installed (`check`).
"""
