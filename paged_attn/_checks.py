"""Checks of numbers and of copies that all classes of the host side share."""

from __future__ import annotations

from operator import index
from typing import NoReturn, SupportsIndex

__all__ = ["check_count", "check_salt", "refuse_shallow_copy", "require"]


def check_count(what: str, value: SupportsIndex, minimum: int) -> int:
    """The number as an int: any integer type, numpy's too, but no bool.

    Raises TypeError for what is no integer, ValueError if it is below `minimum`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)
    except TypeError:
        raise TypeError(f"{what} must be an int, got {type(value).__name__}") from None
    if number < minimum:
        raise ValueError(f"{what} must be at least {minimum}, got {number}")
    return number


def check_salt(what: str, salt: str) -> None:
    """Raises TypeError unless a salt is a str."""
    if not isinstance(salt, str):
        raise TypeError(f'{what}: salt must be a str, "" for none, got {type(salt).__name__}')


def require(condition: bool, message: str) -> None:
    """Raises AssertionError, also under python -O, unless an invariant holds."""
    if not condition:
        raise AssertionError(f"blocks: {message}")


def refuse_shallow_copy(self: object) -> NoReturn:
    """`__copy__` of what would share its tables with the copy, and then contradict it."""
    raise TypeError(
        f"{type(self).__name__}: copy.copy() would share the bookkeeping with the copy; use "
        "copy.deepcopy()"
    )
