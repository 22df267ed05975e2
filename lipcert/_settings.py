"""The names and numbers that runs are asked for, without torch: what commands, runs and their results agree on."""

from __future__ import annotations

import math
from fractions import Fraction

from lipcert.errors import InputError

# Methods of a certificate, from the cheapest to the strongest, and what they can state about themselves.
SINGLE = ("global", "gloro", "local", "lofast", "anchored")
METHODS = ("staged", *SINGLE)
# These take norms of Jacobians.
LINEARISED = ("lofast", "anchored")
# These draw no start vectors: their certificates are deterministic.
DETERMINISTIC = ("global", "gloro")


def parse_eps(text: str) -> float:
    """The smallest float64 that is not below the number written, which may be a fraction such as 36/255.

    Raises:
        InputError: if it is not a positive number.
    """
    error = InputError(f"eps must be a positive number, got {text!r}; for example 36/255, 0.5 or 1e-3")
    parts = text.split("/")
    try:
        # As floats first: an exact 1e-999999999 would have a billion digits.
        if len(parts) > 2 or not all(0 < float(part) < math.inf for part in parts):
            raise error
        numerator, denominator = Fraction(parts[0]), Fraction(parts[1] if len(parts) == 2 else 1)
        exact = numerator / denominator
        nearest = float(exact)
    except (ValueError, OverflowError):
        raise error from None
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)
