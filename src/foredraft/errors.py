"""Everything foredraft refuses, as one small hierarchy.

Each message says what was given, what is allowed, and what to do about it. The command line prints the message alone
and exits with status 2; the Python API raises.
"""


class ForedraftError(Exception):
    """Base class of all errors a user can cause."""


class InvalidInputError(ForedraftError, ValueError):
    """A setting, prompt or tensor outside what is allowed. Also a `ValueError`.

    Args:
        message: What was given, what is allowed, what to do.
        field: The name of the setting, if it is one.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelError(ForedraftError):
    """A model that cannot be found, fetched, read or trusted."""


class UnsupportedError(ForedraftError):
    """A pair that cannot work together (model and backend, target and drafter): named when the engine is built."""
