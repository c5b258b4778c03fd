"""Self-contained HTML pages: style, script and data are embedded, and nothing else may run or be loaded.

A page is three files in its owner's folder: ``NAME.html`` (a template of ``str.format``), ``NAME.css`` and ``NAME.js``.
Texts of a model are data: they are embedded as JSON without a single ``<``, and scripts show them as text.
"""

from __future__ import annotations

import html
import json
from base64 import b64encode
from hashlib import sha256
from pathlib import Path


def self_contained_page(folder: Path, name: str, *, title: str, text: str, data: object) -> str:
    """Build a page.

    Args:
        folder: Folder of the three files.
        name: Their name without suffix.
        title: Title of the page.
        text: Shown where scripts are off.
        data: JSON value for the script, as ``JSON.parse`` of the element ``data``.
    """
    page, style, script = ((folder / f"{name}.{suffix}").read_text("utf-8") for suffix in ("html", "css", "js"))
    content = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return page.format(
        rules=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'",
        title=html.escape(title),
        style=style,
        text=html.escape(text),
        # No HTML parser can leave this JSON: the three characters with a meaning in HTML are escaped.
        data=content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        script=script,
    )


def _digest(source: str) -> str:
    return f"sha256-{b64encode(sha256(source.encode()).digest()).decode()}"


def notebook_frame(page: str, height: int) -> str:
    """Return a page as a sandboxed frame of ``height`` pixels for a notebook's output."""
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(page)}"></iframe>'
