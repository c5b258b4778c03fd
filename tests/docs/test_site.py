"""The documentation site builds without warnings: no dead link, no page outside the navigation, no failed reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]  # --quiet hides warnings
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_pages_load_nothing_from_other_servers(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text("utf-8"))
        assert not loaded, f"{page.relative_to(site)} loads {loaded}"


def test_every_command_and_key_is_listed(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text("utf-8")
    assert all(f'id="kvad-{name}"' in commands for name in ("generate", "train", "verify", "session-save"))
    assert "--max-seq-len" in commands
    keys = (site / "reference" / "configuration.html").read_text("utf-8")
    assert all(key in keys for key in ("max_seq_len", "gradient_accumulation_steps", "top_p", "block_size"))


def test_dead_links_fail(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[gone](gone.md)\n")
    settings = "site_name: x\nstrict: true\nvalidation: {links: {not_found: warn}}\n"
    (tmp_path / "mkdocs.yml").write_text(settings)
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert built.returncode != 0 and "gone.md" in built.stderr
