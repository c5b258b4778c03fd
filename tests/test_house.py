"""The house of docs/architecture.md: floors, circles, walls, the no-torch list, the public names.

Every wall is tested twice: that this house keeps it, and that it objects to a house that does not.
"""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import kvad
from kvad.cli.main import COMMANDS
from tests import house
from tests.house import House

ROOT = Path(__file__).parents[1]
HOUSE = house.read_house(ROOT, kvad._HOMES)
RULES = [
    house.homeless,
    house.wrong_arrows,
    house.circles,
    house.breached_walls,
    house.torch_leaks,
    house.stray_kernels,
    house.pickles,
    house.dynamic_imports,
    house.ambient_state,
    house.undocumented,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule):
    objections = rule(HOUSE)
    assert not objections, "\n" + "\n".join(objections)


# Each fault: the rule that must object, the false house, and a word of the objection.
FAULTS = {
    "no floor": (house.homeless, {"kvad.attic": ""}, "kvad.attic"),
    "upward": (
        house.wrong_arrows,
        {"kvad.cache.a": "import kvad.engine.b", "kvad.engine.b": ""},
        "upward, floor 3 to 5",
    ),
    "upward, relative": (
        house.wrong_arrows,
        {"kvad.cache.a": "from ..engine import b", "kvad.engine": "", "kvad.engine.b": ""},
        "imports kvad.engine.b",
    ),
    "upward, in a package's own file": (
        house.wrong_arrows,
        {"kvad.cache": "from ..engine.b import x", "kvad.cache.a": "", "kvad.engine.b": ""},
        "kvad.cache:1 imports kvad.engine.b",
    ),
    "upward, in a function": (
        house.wrong_arrows,
        {"kvad.ops.a": "class A:\n  def f(self):\n    from kvad.llm import LLM", "kvad.llm": ""},
        "kvad.ops.a:3",
    ),
    "upward, for types": (
        house.wrong_arrows,
        {"kvad.ops.a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import kvad.llm", "kvad.llm": ""},
        "kvad.ops.a:3",
    ),
    "upward, in a try": (house.wrong_arrows, {"kvad.ops.a": "try:\n  import kvad.llm\nfinally:\n  pass"}, "upward"),
    "upward, through the front door": (
        house.wrong_arrows,
        {"kvad.engine.a": "from kvad import LLM"},
        "imports kvad.llm",
    ),
    "the front door itself": (house.wrong_arrows, {"kvad.engine.a": "import kvad"}, "floor 5 to 9"),
    "sideways": (
        house.wrong_arrows,
        {"kvad.ops.a": "from kvad.text import hf_tokenizer as bpe", "kvad.text": ""},
        "sideways",
    ),
    "sideways, files of floor 1": (house.wrong_arrows, {"kvad.config.model": "import kvad.model_input"}, "sideways"),
    "a circle of two": (
        house.circles,
        {"kvad.ops.a": "from kvad.ops import b", "kvad.ops.b": "def f():\n  import kvad.ops.a"},
        "kvad.ops.a -> kvad.ops.b -> kvad.ops.a",
    ),
    "a circle of three": (
        house.circles,
        {"kvad.ops.a": "from .b import x", "kvad.ops.b": "from .c import x", "kvad.ops.c": "from .a import x"},
        "kvad.ops.a -> kvad.ops.b -> kvad.ops.c -> kvad.ops.a",
    ),
    "a circle with its package": (
        house.circles,
        {"kvad.ops": "from kvad.ops.a import x", "kvad.ops.a": "from kvad.ops import y"},
        "kvad.ops -> kvad.ops.a",
    ),
    "model to cache": (
        house.breached_walls,
        {"kvad.model.a": "def f():\n  import kvad.cache.b"},
        "never imports kvad.cache",
    ),
    "cache to model": (house.breached_walls, {"kvad.cache.a": "import kvad.model"}, "never imports kvad.model"),
    "train to cache": (house.breached_walls, {"kvad.train.a": "from kvad.cache.groups import x"}, "kvad.train never"),
    "train to engine": (house.breached_walls, {"kvad.train.a": "import kvad.engine"}, "kvad.train never"),
    "train to lab": (house.breached_walls, {"kvad.train.a": "import kvad.lab"}, "kvad.train never"),
    "torch": (
        house.torch_leaks,
        {"kvad.engine.scheduling.scheduler": "import torch"},
        "kvad.engine.scheduling.scheduler -> torch",
    ),
    "torch, a part of it": (
        house.torch_leaks,
        {"kvad.text.a": "from torch.nn import Module"},
        "kvad.text.a -> torch.nn",
    ),
    "torch, in a class": (house.torch_leaks, {"kvad.config.model": "class A:\n  import torch"}, "kvad.config.model"),
    "torch, through safetensors": (
        house.torch_leaks,
        {"kvad.planning.report": "from safetensors import torch"},
        "safetensors.torch",
    ),
    "torch, through a friend": (
        house.torch_leaks,
        {
            "kvad.cache.manager.kv_cache_manager": "from kvad.cache.manager.block_pool import x",
            "kvad.cache.manager.block_pool": "import torch.nn",
        },
        "kvad.cache.manager.kv_cache_manager -> kvad.cache.manager.block_pool -> torch.nn",
    ),
    "torch, through the package around": (
        house.torch_leaks,
        {
            "kvad.cache.manager.kv_cache_manager": "",
            "kvad.cache": "from .memory import x",
            "kvad.cache.device.kv_cache": "import torch",
        },
        "kvad.cache.manager.kv_cache_manager -> kvad.cache -> kvad.cache.device.kv_cache -> torch",
    ),
    "torch, in a command's file": (house.torch_leaks, {"kvad.cli.a": "if True:\n  import torch"}, "kvad.cli.a"),
    "a kernel": (
        house.stray_kernels,
        {"kvad.model.a": "y = F.scaled_dot_product_attention(q, k, v)"},
        "picks a kernel",
    ),
    "a kernel, imported": (
        house.stray_kernels,
        {"kvad.cache.a": "from torch.nn.attention.flex_attention import flex_attention as f"},
        "picks a kernel",
    ),
    "a kernel, of a call's result": (house.stray_kernels, {"kvad.lab.a": "f().scaled_dot_product_attention"}, "picks"),
    "torch.compile": (house.stray_kernels, {"kvad.train.a": "import torch\nm = torch.compile(m)"}, "compile"),
    "torch.compile, imported": (house.stray_kernels, {"kvad.llm": "from torch import compile"}, "compile"),
    "pickle": (house.pickles, {"kvad.checkpoint.a": "def f():\n  import pickle"}, "pickle"),
    "torch.save": (house.pickles, {"kvad.checkpoint.a": "torch.save(x, p)"}, "torch.save"),
    "torch.load, imported": (house.pickles, {"kvad.checkpoint.a": "from torch import load"}, "torch.load"),
    "allow_pickle": (house.pickles, {"kvad.train.a": "np.load(p, allow_pickle=True)"}, "allow_pickle"),
    "importlib": (house.dynamic_imports, {"kvad.ops.a": "importlib.import_module('kvad.llm')"}, "no wall can see"),
    "importlib, imported": (house.dynamic_imports, {"kvad.ops.a": "from importlib import import_module"}, "no wall"),
    "__import__": (house.dynamic_imports, {"kvad.ops.a": "__import__('torch')"}, "no wall can see"),
    "a cache at module level": (house.ambient_state, {"kvad.ops.a": "seen = {}"}, "seen is mutable"),
    "a list at module level": (house.ambient_state, {"kvad.ops.a": "rows: list[int] = list()"}, "rows is mutable"),
    "a deque at module level": (house.ambient_state, {"kvad.ops.a": "rows = collections.deque()"}, "rows is mutable"),
    "global": (house.ambient_state, {"kvad.ops.a": "N = 0\ndef f():\n  global N\n  N += 1"}, "global N"),
    "a table changed": (house.ambient_state, {"kvad.ops.a": "SEEN = {}\ndef f(x):\n  SEEN[x] = 1"}, "f changes SEEN"),
    "a table deleted from": (
        house.ambient_state,
        {"kvad.ops.a": "SEEN = {}\ndef f(x):\n  del SEEN[x]"},
        "changes SEEN",
    ),
    "a table appended to": (house.ambient_state, {"kvad.ops.a": "_S = []\ndef f(x):\n  _S.append(x)"}, "f changes _S"),
    "a context variable": (
        house.ambient_state,
        {"kvad.ops.a": "NOW = contextvars.ContextVar('x')"},
        "no current context",
    ),
    "a thread-local": (house.ambient_state, {"kvad.ops.a": "NOW = threading.local()"}, "no current context"),
    "no package file": (house.undocumented, {"kvad.ops.a": '"Doc."'}, "kvad.ops has no __init__.py"),
    "no docstring": (house.undocumented, {"kvad.ops.a": "# a comment\nx = 1"}, "kvad.ops.a has no docstring"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_wall_objects_to(fault):
    rule, tree, says = FAULTS[fault]
    objections = rule(House(tree, {"LLM": "kvad.llm"}))
    assert len(objections) >= 1 and any(says in objection for objection in objections), objections


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_has_a_fault(rule):
    assert any(other is rule for other, _, _ in FAULTS.values())


def test_a_sound_small_house_gets_no_objection():
    sound = {
        "kvad": '"Doc."\ndef __getattr__(name):\n  import importlib\n  importlib.import_module(name)',
        "kvad.errors": '"Doc."\n__all__ = ["E"]',
        "kvad.model_input": '"Doc."\nimport typing\nif typing.TYPE_CHECKING:\n  import torch\nelse:\n  import math',
        "kvad.ops": '"Doc."',
        "kvad.ops.attention": '"Doc."\nimport torch\nKERNELS = {1: 2}\ndef f(q):\n  F.scaled_dot_product_attention(q)',
        "kvad.engine": '"Doc."',
        "kvad.engine.execution.model_runner": '"Doc."\nimport torch\nfrom kvad.ops.attention import f\ng = torch.compile(f)',
        "kvad.engine.scheduling.scheduler": '"Doc."\nfrom kvad import __version__\nfrom .request import R\nimport kvad.model_input',
        "kvad.engine.scheduling.request": '"Doc."\nfrom kvad.errors import E',
        "kvad.llm": '"Doc."\nfrom kvad.engine.execution import model_runner as runner\ndef f(rows):\n  SEEN = []\n  SEEN.append(rows)',
        "kvad.cli": '"Doc."',
        "kvad.cli.commands.train": '"Doc."\ndef train():\n  import torch\n  from kvad import LLM\n  re.compile("x")',
    }
    for rule in RULES:
        assert rule(House(sound, {"LLM": "kvad.llm"})) == []


def test_the_house_was_read():
    assert {"kvad", "kvad.errors", "kvad.cli", "kvad.cli.main"} <= set(HOUSE.tree)
    assert sum(len(imports) for imports in HOUSE.imports.values()) > 20


# --- the same by running it: what really gets loaded


def modules_after(program):
    """Run a program in a fresh interpreter; the modules that it had loaded when it ended, and its output."""
    program = f"import atexit, sys\natexit.register(lambda: print('\\n@', *sys.modules))\n{program}"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert "\n@ " in ran.stdout, ran.stderr
    return set(ran.stdout.rpartition("\n@ ")[2].split()), ran


QUIET = [
    name
    for name in HOUSE.tree
    if name != "kvad.__main__"
    and any(name == one or (one != "kvad" and house.within(name, one)) for one in house.WITHOUT_TORCH)
]


def test_the_no_torch_list_loads_no_torch():
    steps = "\n".join(f"import {name}\nassert 'torch' not in sys.modules, {name!r}" for name in QUIET)
    loaded, ran = modules_after(steps)
    assert ran.returncode == 0, ran.stderr
    assert "torch" not in loaded


def test_the_probe_sees_torch():
    loaded, ran = modules_after("import torch")
    assert ran.returncode == 0 and "torch" in loaded


HELP = [[name, "--help"] for name, (home, _) in COMMANDS.items() if home.partition(":")[0] in HOUSE.tree]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["--no-such-flag"], 2),
        (["no-such-command"], 2),
        ([], 2),
        (["completion", "bash"], 0),
        *((one, 0) for one in HELP),
        *(([one[0], "--no-such-flag"], 2) for one in HELP),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_help_version_and_usage_errors_load_no_torch(arguments, code):
    loaded, ran = modules_after(f"from kvad.cli.main import main\nsys.exit(main({arguments!r}))")
    assert ran.returncode == code, ran.stderr
    heavy = sorted({"torch", "numpy", "matplotlib", "tokenizers", "transformers"} & loaded)
    assert not heavy


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_is_there_and_says_what_it_does(name):
    home, short_help = COMMANDS[name]
    module, _, attribute = home.partition(":")
    assert module.startswith("kvad.cli.") and short_help.endswith((".", "?", "!"))
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command) and command.help


# --- the public names


def test_public_names():
    assert kvad.__all__ == ["LLM", "KvadError", "__version__"]
    assert sorted(kvad._HOMES) == sorted(set(kvad.__all__) - {"__version__"})
    assert set(kvad.__all__) <= set(dir(kvad))


@pytest.mark.parametrize("name", kvad.__all__)
def test_a_public_name_is_there(name):
    assert getattr(kvad, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'kvad' has no attribute 'Cache'"):
        _ = kvad.Cache


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    names = {spec.partition("=")[0].partition(">")[0].lower() for spec in wanted}
    assert names <= set(pins)
    assert pins["torch"] == "2.13.0" and "torch==2.13.0" in (ROOT / "Makefile").read_text()
