"""The cache trace as one HTML file: the map, the text and a slider over the steps.

The file is self-contained: style and script (``trace_html.css``, ``trace_html.js``) and the report as JSON are
embedded, and its content security policy forbids any other script and any request. Text of the model is data: it is
embedded without a single ``<``, and the script shows it as text. Without scripts a reader gets the terminal's map.
"""

from __future__ import annotations

import html
import json
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from kvad.inspection.trace_report import TraceReport, trace_to_json
from kvad.inspection.trace_text import trace_to_text

BODY = """<main>
<h1 id="title"></h1>
<p id="facts"></p>
<div id="groups"></div>
<div id="storage"></div>
<div class="card">
<div class="bar"><select id="rows" aria-label="sequence"></select><button id="play">Play</button>
<input id="step" type="range" min="0" value="0" aria-label="step"><span id="now"></span></div>
<div class="legend" id="legend"></div>
<p class="dim" id="events"></p>
</div>
<div class="card"><h2>Text</h2><div id="words"></div></div>
<div class="split">
<div class="card"><h2>Where each token is held</h2>
<p class="dim">Attention is that of the whole run; the red line is the prompt's end.</p>
<div id="scroll"><canvas id="map"></canvas></div></div>
<div class="card"><h2>Token</h2><div id="story"></div></div>
</div>
<div class="card"><h2>Blocks at the end of the sequence, and the attention that their tokens received</h2>
<div class="wide"><table><thead><tr><th>block</th><th>layers</th><th>state</th><th>tokens</th><th>used by</th>
<th>share</th><th></th></tr></thead><tbody id="blocks"></tbody></table></div></div>
</main>"""


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{rules}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<noscript><pre>{text}</pre></noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def trace_to_html(report: TraceReport) -> str:
    """Build the whole file."""
    style, script = (Path(__file__).with_suffix(ending).read_text(encoding="utf-8") for ending in (".css", ".js"))
    return PAGE.format(
        rules=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'",
        title=html.escape(f"{report.model}: {report.policy}"),
        style=style,
        body=BODY,
        text=html.escape(trace_to_text(report)),
        data=_data(report),
        script=script,
    )


def _digest(source: str) -> str:
    return f"sha256-{b64encode(sha256(source.encode()).digest()).decode()}"


def _data(report: TraceReport) -> str:
    """Encode as JSON that no HTML parser can leave: the three characters with a meaning in HTML are escaped."""
    text = json.dumps(trace_to_json(report), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
