"""Numbers as people read them in reports."""

MISSING = "n/a"


def as_number(value: float | None, digits: int) -> str:
    """Returns a plain number; "-" where it has no meaning."""
    return "-" if value is None else f"{value:.{digits}f}"


def as_percent(value: float | None) -> str:
    """Returns a share in percent."""
    return MISSING if value is None else f"{value:.1%}"


def as_seconds(value: float | None) -> str:
    """Returns a time with its unit."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    size = abs(value)
    return f"{value:.2f} s" if size >= 1 else f"{value * 1e3:.2f} ms" if size >= 1e-3 else f"{value * 1e6:.0f} µs"


def as_bytes(value: int | None) -> str:
    """Returns a size in decimal units."""
    if value is None:
        return MISSING
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
