"""One line for each request, as text or JSON, and the last few requests for the page. No prompts unless asked for."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

logger = logging.getLogger("foredraft.serve")

LogFormat = Literal["text", "json"]
_RECENT = 50
_TOLD = (
    "drafter",
    "rule",
    "target_forwards",
    "mean_accepted_length",
    "tokens_per_second",
    "queue_ms",
    "ttft_ms",
    "tpot_ms",
)
_SHOWN_RECENT = (
    "drafter",
    "rule",
    "prompt_tokens",
    "completion_tokens",
    "target_forwards",
    "mean_accepted_length",
    "tokens_per_second",
    "ttft_ms",
    "seconds",
)


@dataclass
class Record:
    """What is noted about one request while it runs."""

    id: str
    method: str
    endpoint: str
    started: float = field(default_factory=time.perf_counter)
    at: float = field(default_factory=time.time)
    status: int | None = None
    outcome: str | None = None
    """`stop`, `length` or `tool_calls`, `cancelled`, or the code of an error."""
    figures: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, Any] = field(default_factory=dict)
    """Prompt and answer; only if they may be logged."""

    def answered(self, usage: Mapping[str, Any]) -> None:
        """Note the figures of its `usage`."""
        counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        self.figures = {**counts, **{name: usage["foredraft"][name] for name in _TOLD}}

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.perf_counter() - self.started


class Recent:
    """The last requests for answers, newest first."""

    def __init__(self) -> None:
        self._records: deque[dict[str, Any]] = deque(maxlen=_RECENT)

    def add(self, record: Record) -> None:
        """A request that has ended."""
        figures = {**record.figures, "seconds": record.seconds}
        self._records.appendleft(
            {
                "id": record.id,
                "at": record.at,
                "endpoint": record.endpoint,
                **{name: figures.get(name) for name in _SHOWN_RECENT},
                "outcome": record.outcome,
            }
        )

    def listed(self) -> list[dict[str, Any]]:
        """For `/foredraft/status`."""
        return list(self._records)


def log_request(record: Record) -> None:
    """Write the line of a request that has ended. Health checks and the like are only for debugging."""
    fields = {
        "id": record.id,
        "method": record.method,
        "endpoint": record.endpoint,
        "status": record.status,
        "outcome": record.outcome,
        "seconds": record.seconds,
        **record.figures,
        **record.texts,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    level = logging.INFO if record.method == "POST" or (record.status or 500) >= 400 else logging.DEBUG
    logger.log(level, "request", extra={"fields": given})


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `at` (Unix seconds), `level`, `message`, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line = {
            "at": record.created,
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """One line for people: time, level, message, and the fields as `name=value`. Line breaks are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        pairs = [f"{name}={_short(value)}" for name, value in getattr(record, "fields", {}).items()]
        line = " ".join([clock, record.levelname.lower(), record.getMessage(), *pairs])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


FORMATTERS: dict[LogFormat, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)
