"""Docstrings name things by roles, as in :class:`~lipcert.model.Model`; on a page the name alone stands."""

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>~?(?:[\w.]+\.)?(\w+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return _ROLE.sub(r"<code>\1</code>", html)
