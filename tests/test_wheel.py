"""A wheel of this tree, installed in an environment of its own: the command runs, and all data files are there."""

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.cli_checkpoints import write_model

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.long(minutes=1)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Build and install without downloads: the dependencies are those of this environment. Return its folder."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    offline = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder)]
    subprocess.run([*offline, *build], check=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    install = ["--python", str(folder / "env"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*offline, *install], check=True, timeout=120)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env"


def run(installed, *arguments):
    command = [installed / "bin" / arguments[0], *map(str, arguments[1:])]
    return subprocess.run(command, cwd=installed, capture_output=True, text=True, timeout=60)


def test_the_command_of_a_wheel_runs_with_its_data_files(installed, tmp_path):
    home = run(installed, "python", "-c", "import kvad; print(kvad.__file__)").stdout
    assert Path(home.strip()).is_relative_to(installed)
    assert "kvad demo" in run(installed, "kvad", "--help").stdout
    model = write_model(tmp_path / "tiny")
    planned = run(installed, "kvad", "plan", model, "--bandwidth", 10, "--fit-memory", "1GiB", "--json")
    assert planned.returncode == 0 and json.loads(planned.stdout)["fit"]["table"]["rows"], planned.stderr
    page = tmp_path / "cache.html"
    traced = run(installed, "kvad", "inspect", model, "--cache", "--prompt", "ab", "-n", 2, "--html", page)
    assert traced.returncode == 0 and "<!doctype html>" in page.read_text(), traced.stderr


def test_a_wheel_has_every_file_of_the_package(installed):
    (packages,) = installed.glob("lib/python*/site-packages")

    def files(folder):
        return {path.relative_to(folder) for path in (folder / "kvad").rglob("*.*") if "__pycache__" not in path.parts}

    assert files(packages) == files(ROOT)
