"""Self-contained HTML pages: style, script and data are embedded, and nothing else may run or be loaded.

``page.html`` (a template of ``str.format``), ``page.css`` and ``page.js`` are common to all pages. A page adds three
files of its owner's folder to them: ``NAME.html`` (its body), ``NAME.css`` and ``NAME.js``.
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
        folder: Folder of the page's own three files.
        name: Their name without suffix.
        title: Title of the page.
        text: Shown where scripts are off.
        data: JSON value for the script, as ``JSON.parse`` of the element ``data``.
    """
    page, *common = _files(Path(__file__).with_name("page"))
    body, *own = _files(folder / name)
    style, script = (first + second for first, second in zip(common, own, strict=True))
    content = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return page.format(
        body=body,
        rules=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'",
        title=html.escape(title),
        style=style,
        text=html.escape(text),
        # No HTML parser can leave this JSON: the three characters with a meaning in HTML are escaped.
        data=content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        script=script,
    )


def _files(stem: Path) -> list[str]:
    return [stem.with_suffix(f".{suffix}").read_text("utf-8") for suffix in ("html", "css", "js")]


def _digest(source: str) -> str:
    return f"sha256-{b64encode(sha256(source.encode()).digest()).decode()}"


def notebook_frame(page: str, height: int) -> str:
    """Return a page as a sandboxed frame of ``height`` pixels for a notebook's output."""
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(page)}"></iframe>'
