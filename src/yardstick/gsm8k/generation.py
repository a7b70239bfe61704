"""What a backend gives back for one problem."""

from dataclasses import dataclass

STOP, LENGTH, NOT_ASKED = "stop", "length", "not_asked"


@dataclass(frozen=True)
class Generation:
    """Text that a model wrote, and why it ended.

    `finish_reason` is "stop" (the model ended, or wrote a stop string), "length" (it ran into the token limit) or
    "not_asked" (no model could be asked; `fault` says why, and `text` is empty).
    """

    text: str
    finish_reason: str
    tokens: int | None = None  # generated, where the backend tells
    fault: str | None = None
