"""The import rules of docs/contributing/architecture.md, checked on kvad and on small trees that break them."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

import kvad
from kvad.cli.main import COMMANDS
from tests.support import import_rules as rules
from tests.support.import_rules import Source

ROOT = Path(__file__).parents[1]
KVAD = Source.read(ROOT)
DOOR = "if TYPE_CHECKING:\n  from kvad.{0}.{1} import {2} as {2}\n"


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_kvad_has_no_violations(rule):
    assert rule(KVAD) == []


BROKEN = {
    "upward": (rules.upward_imports, {"cache.a": "import kvad.engine.b", "engine.b": ""}),
    "upward, relative": (rules.upward_imports, {"cache.a": "from ..engine import b", "engine.b": ""}),
    "upward, in a function": (rules.upward_imports, {"ops.a": "def f():\n  import kvad.llm", "llm": ""}),
    "upward, for types": (rules.upward_imports, {"ops.a": "if TYPE_CHECKING:\n  import kvad.llm", "llm": ""}),
    "upward, in a try": (rules.upward_imports, {"ops.a": "try:\n  import kvad.llm\nfinally:\n  pass", "llm": ""}),
    "upward, in a package": (rules.upward_imports, {"cache.a": "import kvad.cache.manager.b", "cache.manager.b": ""}),
    "upward, in a door": (rules.upward_imports, {"cache": "import kvad.engine.b", "cache.a": "", "engine.b": ""}),
    "the front door": (rules.upward_imports, {"engine.a": "from kvad import LLM"}),
    "sideways": (
        rules.upward_imports,
        {"model.a": "import kvad.text", "text.b": "import kvad.config.c", "config.c": ""},
    ),
    "no layer": (rules.upward_imports, {"shelf.a": "import kvad.errors", "errors": ""}),
    "model to cache": (rules.forbidden_imports, {"model.a": "def f():\n  import kvad.cache.b", "cache.b": ""}),
    "cache to model": (rules.forbidden_imports, {"cache.a": "import kvad.model.b", "model.b": ""}),
    "train to engine": (rules.forbidden_imports, {"train.a": "import kvad.engine.b", "engine.b": ""}),
    "a circle": (rules.circles, {"ops.a": "import kvad.ops.b", "ops.b": "def f():\n  import kvad.ops.a"}),
    "a circle of three": (
        rules.circles,
        {"ops.a": "from .b import x", "ops.b": "from .c import x", "ops.c": "from .a import x"},
    ),
    "a circle through a door": (
        rules.circles,
        {"ops": DOOR.format("ops", "b", "X"), "ops.a": "from kvad.ops import X", "ops.b": "import kvad.ops.a"},
    ),
    "a circle through a namespace": (
        rules.circles,
        {
            "ops": "if TYPE_CHECKING:\n  from kvad.ops import b as b",
            "ops.a": "from kvad import ops\ndef f():\n  ops.b.g()",
            "ops.b": "import kvad.ops.a",
        },
    ),
    "a long chain": (
        rules.long_chains,
        {f"ops.a{i}": f"import kvad.ops.a{i + 1}" for i in range(10)} | {"ops.a10": ""},
    ),
    "past a door": (rules.imports_past_a_door, {"engine.a": "from kvad.cache.b import X", "cache.b": ""}),
    "past a door, downward": (
        rules.imports_past_a_door,
        {"cache.a": "import kvad.cache.manager.b", "cache.manager.b": ""},
    ),
    "fifteen files": (rules.crowded_folders, {f"ops.a{i}": "" for i in range(15)}),
    "torch": (rules.torch_imports, {"engine.scheduling.a": "import torch"}),
    "torch, a part of it": (rules.torch_imports, {"text.a": "from torch.nn import Module"}),
    "torch, in a class": (rules.torch_imports, {"config.a": "class A:\n  import torch"}),
    "torch, through safetensors": (rules.torch_imports, {"planning.a": "from safetensors import torch"}),
    "torch, through a file": (rules.torch_imports, {"cache.a": "import kvad.ops.b", "ops.b": "import torch.nn"}),
    "torch, through a door": (
        rules.torch_imports,
        {"ops": DOOR.format("ops", "b", "X"), "ops.b": "import torch", "cache.a": "from kvad.ops import X"},
    ),
    "torch, in a door": (rules.torch_imports, {"model": "import torch", "model.a": ""}),
    "a kernel": (rules.misplaced_uses, {"model.a": "y = F.scaled_dot_product_attention(q, k, v)"}),
    "a kernel, imported": (
        rules.misplaced_uses,
        {"cache.a": "from torch.nn.attention.flex_attention import flex_attention"},
    ),
    "torch.compile": (rules.misplaced_uses, {"train.a": "m = torch.compile(m)"}),
    "pickle": (rules.misplaced_uses, {"checkpoint.a": "def f():\n  import pickle"}),
    "torch.load": (rules.misplaced_uses, {"checkpoint.a": "from torch import load"}),
    "a dynamic import": (rules.misplaced_uses, {"ops.a": "importlib.import_module('kvad.llm')"}),
    "a context variable": (rules.misplaced_uses, {"ops.a": "NOW = contextvars.ContextVar('x')"}),
    "a mutable global": (rules.mutable_globals, {"ops.a": "seen = {}"}),
    "a mutable global, annotated": (rules.mutable_globals, {"ops.a": "rows: list[int] = list()"}),
    "a global statement": (rules.mutable_globals, {"ops.a": "N = 0\ndef f():\n  global N\n  N += 1"}),
    "a changed table": (rules.mutable_globals, {"ops.a": "SEEN = {}\ndef f(x):\n  SEEN[x] = 1"}),
    "a deletion": (rules.mutable_globals, {"ops.a": "SEEN = {}\ndef f(x):\n  del SEEN[x]"}),
    "an append": (rules.mutable_globals, {"ops.a": "_S = []\ndef f(x):\n  _S.append(x)"}),
}


def tree(files):
    """Return a tree of modules with the doors that ``files`` lack."""
    full = {f"kvad.{name}": text for name, text in files.items()}
    doors = {name.rsplit(".", i)[0]: "" for name in full for i in range(1, name.count(".") + 1)}
    return Source({"kvad": "", **doors, **full})


@pytest.mark.parametrize("case", BROKEN)
def test_violation_is_reported(case):
    rule, files = BROKEN[case]
    assert rule(tree(files))


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_every_rule_has_a_violating_example(rule):
    assert any(broken is rule for broken, _ in BROKEN.values())


def test_correct_tree_has_no_violations():
    files = {
        "errors": "class E: ...",
        "model_input": "import typing\nif typing.TYPE_CHECKING:\n  import torch\nelse:\n  import math",
        "ops.attention": "import torch\nKERNELS = {1: 2}\ndef f(q):\n  F.scaled_dot_product_attention(q)",
        "ops": DOOR.format("ops", "attention", "f"),
        "engine.execution.model_runner": "from kvad.ops import f\ng = torch.compile(f)",
        "engine.scheduling.scheduler": "from kvad import __version__\nfrom .request import R\nimport kvad.model_input",
        "engine.scheduling.request": "from kvad.errors import E",
        "llm": "def f(rows):\n  SEEN = []\n  SEEN.append(rows)",
        "cli.commands.train": "def train():\n  import torch\n  from kvad import llm\n  re.compile('x')",
    }
    assert {rule.__name__: rule(tree(files)) for rule in rules.RULES} == {rule.__name__: [] for rule in rules.RULES}


def test_rules_read_all_of_kvad():
    assert {"kvad", "kvad.errors", "kvad.cli.main", "kvad.cache.manager.block_pool"} <= set(KVAD.trees)
    assert sum(len(imports) for imports in KVAD.files.values()) > 2000


# --- at run time


def modules_after(program):
    """Run a program in a new interpreter; return the modules it had loaded at exit, and the finished process."""
    program = f"import atexit, sys\natexit.register(lambda: print('\\n@', *sys.modules))\n{program}"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert "\n@ " in ran.stdout, ran.stderr
    return set(ran.stdout.rpartition("\n@ ")[2].split()), ran


def test_torch_free_modules_load_no_torch():
    names = [name for name in KVAD.trees if name != "kvad.__main__" and rules.is_torch_free(KVAD, name)]
    assert len(names) > 100
    loaded, ran = modules_after(
        "\n".join(f"import {name}\nassert 'torch' not in sys.modules, {name!r}" for name in names)
    )
    assert ran.returncode == 0, ran.stderr
    assert "torch" not in loaded


def test_loaded_torch_is_detected():
    loaded, ran = modules_after("import torch")
    assert ran.returncode == 0 and "torch" in loaded


HEAVY = {"torch", "numpy", "matplotlib", "tokenizers", "transformers"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["--version"], 0), (["--no-such-flag"], 2), (["no-such-command"], 2), ([], 2)],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_help_and_usage_errors_load_no_torch(arguments, code):
    loaded, ran = modules_after(f"from kvad.cli.main import main\nsys.exit(main({arguments!r}))")
    assert ran.returncode == code, ran.stderr
    assert not HEAVY & loaded


def test_help_and_usage_errors_of_commands_load_no_torch():
    """All commands run in one process, which reports the first that fails or loads one of the modules."""
    runs = [(["completion", "bash"], 0)]
    runs += [([name, option], code) for name in COMMANDS for option, code in (("--help", 0), ("--no-such-flag", 2))]
    _, ran = modules_after(
        f"from kvad.cli.main import main\nfor arguments, code in {runs!r}:\n"
        f"  assert main(arguments) == code, arguments\n  assert not {HEAVY!r} & sys.modules.keys(), arguments"
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_has_help(name):
    home, short_help = COMMANDS[name]
    module, _, attribute = home.partition(":")
    assert module.startswith("kvad.cli.") and short_help.endswith((".", "?"))
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command) and command.help


# --- public names


@pytest.mark.parametrize("package", sorted(KVAD.packages))
def test_every_public_name_of_a_door_loads(package):
    if package == "kvad.ops.triton":
        pytest.importorskip("triton")  # a part of torch's CUDA build
    door = importlib.import_module(package)
    for name in getattr(door, "__all__", ()):
        assert getattr(door, name) is not None
    assert set(getattr(door, "__all__", ())) <= set(dir(door))


def test_public_names_of_kvad():
    assert kvad.__all__ == ["LLM", "AsyncLLM", "KvadError", "__version__", "plan", "register", "train", "verify"]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        kvad.nothing  # noqa: B018


# ---------------------------------------------------------------- tests


WAITING_CALLS = ("run", "call", "check_call", "check_output")  # of subprocess


def calls_without_timeout(text):
    """Return the lines of calls that may wait for a process forever."""
    tree = ast.parse(text)
    is_process = set()  # names of Popen objects
    for node in ast.walk(tree):
        bound = []
        if isinstance(node, ast.Assign):
            bound = [(node.value, target) for target in node.targets]
        elif isinstance(node, ast.withitem):
            bound = [(node.context_expr, node.optional_vars)]
        is_process |= {ast.unparse(name) for call, name in bound if "subprocess.Popen(" in ast.unparse(call) and name}
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        waits = (owner == "subprocess" and name in WAITING_CALLS) or name == "communicate"
        waits = waits or (name == "wait" and owner in is_process and not node.args)
        if waits and "timeout" not in {keyword.arg for keyword in node.keywords}:
            lines.append(node.lineno)
    return lines


def test_every_test_has_a_time_limit(pytestconfig):
    """A process that hangs fails its test; a test that hangs ends with its stacks on stderr."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        lines = calls_without_timeout(path.read_text("utf-8"))
        assert not lines, f"{path.relative_to(ROOT)}: calls without timeout in lines {lines}"
    assert float(pytestconfig.getini("faulthandler_timeout")) > 0
    assert pytestconfig.getini("faulthandler_exit_on_timeout") is True


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run(command, check=True)",
        "subprocess.check_output(command)",
        "child = subprocess.Popen(command)\nchild.wait()",
        "with subprocess.Popen(command) as child:\n    child.communicate(b'')",
    ],
)
def test_a_call_without_timeout_is_found(source):
    assert calls_without_timeout(source) == [source.count("\n") + 1]
    *before, call = source.splitlines()
    assert not calls_without_timeout("\n".join([*before, f"{call[:-1]}, timeout=9)".replace("(, ", "(")]))
