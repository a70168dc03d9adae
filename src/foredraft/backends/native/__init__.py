"""The CPU engine: a forward over eight tokens costs little more than over one, and gives the same bits."""
