"""Values of a config or an index, which anybody may have written: each is of its kind, or is refused by name.

JSON gives numbers, strings, lists and objects in any place. A string where a list of names is meant would be taken
letter by letter, and a size beyond 64 bits ends inside torch.
"""

import re
from typing import Any

from yardstick.errors import YardstickError

LARGEST = 2**62  # what torch can still divide positions by


def is_size(value: Any) -> bool:
    """Whether a value is a whole number from 1 on that torch can count with; true and false are not numbers."""
    return type(value) is int and 1 <= value <= LARGEST


def flag(settings: dict[str, Any], key: str, where: str, default: bool = False) -> bool:
    """A value that is true or false; `default` where it is missing or null.

    Raises:
        YardstickError: it is something else.
    """
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):
        raise YardstickError(f"{where}: {key} {value} is neither true nor false")
    return default if value is None else value


def names(settings: dict[str, Any], key: str, where: str) -> list[str]:
    """A list of names or patterns, empty where it is missing or null.

    Raises:
        YardstickError: it is something else.
    """
    value = settings.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise YardstickError(f"{where}: {key} must be a list of names")
    return value


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """A regular expression of a config.

    Raises:
        YardstickError: it is none.
    """
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise YardstickError(f"{where}: pattern {pattern} cannot be read ({error})") from None
