"""Who is next: users take turns, so that one with many asks does not keep the others waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What waits: somebody's."""

    @property
    def user(self) -> str:
        """Whose it is."""
        ...


W = TypeVar("W", bound=Waiting)


class Turns(Generic[W]):
    """A queue for each user. Next is the first of the user who had a turn least recently."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[W]] = {}  # in the order of turns; only users who wait

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[W]:
        for queue in self._queues.values():
            yield from queue

    def add(self, item: W) -> None:
        """Wait, behind what the same user waits for already."""
        self._queues.setdefault(item.user, deque()).append(item)

    def first(self) -> W | None:
        """Who is next; stays in the queue."""
        return next(iter(self._queues.values()))[0] if self._queues else None

    def pop(self) -> W:
        """Take out who is next. Its user's next turn comes after those of all others who wait now."""
        user, queue = next(iter(self._queues.items()))
        item = queue.popleft()
        del self._queues[user]
        if queue:
            self._queues[user] = queue
        return item

    def remove(self, item: W) -> None:
        """Take out anyone, who must be in it."""
        queue = self._queues[item.user]
        queue.remove(item)
        if not queue:
            del self._queues[item.user]
