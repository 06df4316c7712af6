"""Numbers of bytes, for people: "16GiB" to a number, and back."""

import math
import numbers
import re
from typing import Any

import numpy as np

_PREFIXES = "KMGTP"
_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(?:(?:([kmgtp])(i?))?b)?\s*", re.IGNORECASE)


def bytes_in_words(size: int) -> str:
    """The size in the largest binary unit that is not larger than the size."""
    power = max(0, min((abs(size).bit_length() - 1) // 10, len(_PREFIXES)))
    if power == 0:
        return f"{size} B"
    return f"{size / 1024**power:.2f} {_PREFIXES[power - 1]}iB"


def parse_bytes(size: int | float | str) -> int:
    """Whole bytes, from a number or a string such as "16GiB"; or raises."""
    todo = 'Pass bytes, or a string such as "16GiB" (2^30 bytes) or "16GB" (10^9).'
    if isinstance(size, (bool, np.bool_)) or not isinstance(size, (numbers.Real, str)):
        raise TypeError(
            f"memory_limit must be a number of bytes or a string, but it is {size!r} "
            f"of type {type(size).__name__}. {todo}"
        )
    value: Any = size
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        number, prefix, binary = match.groups() if match else ("nan", None, None)
        power = 1 + _PREFIXES.index(prefix.upper()) if prefix else 0
        value = float(number) * (1024 if binary else 1000) ** power
    if not 1 <= value < math.inf:
        raise ValueError(
            "memory_limit must be a number, with one of the units B, KB, KiB, ..., PB, "
            "PiB or none, and it must be finite and at least one byte, but it is "
            f"{size!r}. {todo}"
        )
    return int(value)
