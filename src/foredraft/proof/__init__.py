"""Losslessness that can be checked: output laws by enumeration."""
