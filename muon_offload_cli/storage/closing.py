"""What holds memory, threads or files, and gives them back at the end of a ``with`` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Closes itself at the end of the context, whatever ended it."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
