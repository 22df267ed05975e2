"""The installed version, for files that say what wrote them."""

from importlib import metadata


def version() -> str:
    """lipcert's version, or "unknown" where it runs from a checkout that is not installed."""
    try:
        return metadata.version("lipcert")
    except metadata.PackageNotFoundError:
        return "unknown"
