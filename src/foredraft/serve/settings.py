"""What the HTTP side of the server is set to."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.checks import is_integer, is_number, require


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the server presents itself, whom it lets in, and what it takes.

    Args:
        name: What the model is called in requests and answers.
        max_tokens: Most tokens of an answer whose request names no limit.
        max_body: Most bytes of a request's body.
        api_keys: Whoever sends one of them may ask; with none, everybody may.
        open_metrics: Whether `/metrics` needs no key.
        cors_origins: Pages of these origins may ask from a browser; `*` is any.
        log_prompts: Whether the log shows what was asked and answered.
        ping: Seconds between two comments that keep a silent stream open.
        send_timeout: Seconds after which a client that reads nothing is dropped.

    Raises:
        InvalidInputError: A value is out of range.
    """

    name: str
    max_tokens: int = 2048
    max_body: int = 4 * 2**20
    api_keys: tuple[str, ...] = ()
    open_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False
    ping: float = 15.0
    send_timeout: float = 30.0

    def __post_init__(self) -> None:
        require("name", self.name, bool(self.name.strip()), "a name that is not empty")
        for name in ("max_tokens", "max_body"):
            value = getattr(self, name)
            require(name, value, is_integer(value) and value >= 1, "an integer >= 1")
        for name in ("ping", "send_timeout"):
            value = getattr(self, name)
            require(name, value, is_number(value) and value > 0, "a number of seconds > 0")
