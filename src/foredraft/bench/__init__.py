"""One workload for every method: what is measured, the formula beside it, and the report."""
