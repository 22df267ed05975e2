"""The installed version, which files record."""


def version() -> str:
    """lipcert's version, or "unknown" where it runs from a checkout that is not installed."""
    from importlib import metadata  # takes longer than everything else here

    try:
        return metadata.version("lipcert")
    except metadata.PackageNotFoundError:
        return "unknown"
