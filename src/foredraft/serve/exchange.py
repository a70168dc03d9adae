"""One request while it is answered: asks handed to the worker, events taken in, chunks and objects given out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from time import perf_counter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foredraft.serve.answers import Answers
from foredraft.serve.asks import Answer
from foredraft.serve.figures import Figures
from foredraft.serve.interfaces import Worker
from foredraft.serve.logs import Record
from foredraft.serve.responses import Stream, whole
from foredraft.serve.settings import ServerSettings
from foredraft.types import Event


class Exchange:
    """Carries out an order.

    Args:
        answers: Tells what comes, and knows the order.
        record: Where it is noted.
        settings: Of the server.
    """

    def __init__(self, answers: Answers, record: Record, settings: ServerSettings) -> None:
        self._told, self._record, self._settings = answers, record, settings
        self._order = answers.order
        self._running: list[Answer] = []
        self._first: float | None = None

    async def submit(self, worker: Worker) -> None:
        """Hand over all asks, or none.

        Raises:
            InvalidInputError: An ask is not right.
            UnsupportedError: What it asks for does not fit together.
            Refusal: There is no room.
        """
        try:
            for ask in self._order.asks:
                self._running.append(await worker.submit(ask))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Stop whatever runs."""
        for answer in self._running:
            answer.cancel()

    async def respond(self, request: Request) -> Response:
        """The response, whole or as a stream. If the client goes away, all is cancelled at once."""
        if self._order.stream:
            return Stream(self._chunks(), self._record, self._settings, self._closed)
        try:
            return await whole(self._whole(), request, self._record)
        finally:
            self.cancel()

    async def _closed(self) -> None:
        self.cancel()

    async def _whole(self) -> dict[str, Any]:
        async with aclosing(self._events()) as events:
            async for index, event in events:
                self._told.add(index, event)
        return self._told.whole(self._finish())

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The parts of the stream."""
        try:
            async with aclosing(self._events()) as events:
                async for index, event in events:
                    for chunk in self._told.add(index, event):
                        yield chunk
            usage = self._finish()
            if self._order.include_usage:
                yield self._told.last_chunk(usage)
        finally:
            self.cancel()

    async def _events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Events of all asks as they come, with the index of their choice."""
        n = self._order.n
        async with aclosing(merged(self._running)) as events:
            async for number, (index, event) in events:
                if self._first is None:
                    self._first = perf_counter()
                yield number * n + index, event

    def _finish(self) -> dict[str, Any]:
        """`usage` when all has come, noted too."""
        started, now = self._record.started, perf_counter()
        queued = [answer.queue_seconds for answer in self._running]
        figures = Figures(
            queue_seconds=max((seconds for seconds in queued if seconds is not None), default=None),
            reused_tokens=sum(answer.reused_tokens for answer in self._running),
            first_token_seconds=self._first - started if self._first is not None else None,
            seconds=now - started,
        )
        choices = self._told.choices
        completions = [choice.completion for choice in choices if choice.completion is not None]
        if len(completions) < len(choices):
            raise RuntimeError("the worker ended before all answers were complete")
        usage = self._told.usage(figures)
        self._record.answered(usage)
        self._record.outcome = choices[0].finish_reason
        if self._settings.log_prompts:
            self._record.texts = {"prompt": self._order.shown, "answer": [each.text for each in completions]}
        return usage


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, tuple[int, Event]], None]:
    """Events of several answers with the number of each; the first failure ends all."""
    if len(answers) == 1:
        async for event in answers[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, tuple[int, Event] | Exception | None]] = asyncio.Queue()

    async def pump(number: int, answer: Answer) -> None:
        try:
            async for event in answer:
                queue.put_nowait((number, event))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.ensure_future(pump(number, answer)) for number, answer in enumerate(answers)]
    try:
        left = len(answers)
        while left:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
