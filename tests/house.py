"""The walls of the house, as functions of a tree of sources: each returns its objections, one line each.

A tree is ``{"kvad.cache.manager.block_pool": source, ...}``; a package stands in it under its own name.  Nothing is imported,
so a wall can be shown a small false house (``test_house.py`` does, for every wall).
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FLOORS = {
    "kvad.errors": -1,
    "kvad.config.serialization": 0,
    "kvad.config.layers": 0,
    "kvad.config.plugins": 0,
    "kvad.storage.temp_paths": 0,
    "kvad.config.model": 1,
    "kvad.model_input": 1,
    "kvad.config.flops": 2,
    "kvad.ops": 2,
    "kvad.text": 2,
    "kvad.model": 3,
    "kvad.cache": 3,
    "kvad.checkpoint": 4,
    "kvad.parallel": 4,
    "kvad.train": 5,
    "kvad.engine": 5,
    "kvad.llm": 6,
    "kvad.serve": 7,
    "kvad.lab": 7,
    "kvad.cli": 8,
    "kvad": 9,  # the front door: it fetches names from below when they are asked for
    "kvad.__main__": 9,
}

# (who, whom): never, at any depth of a function, nor for types.
WALLS = [
    ("kvad.model", "kvad.cache"),
    ("kvad.cache", "kvad.model"),
    ("kvad.train", "kvad.cache"),
    ("kvad.train", "kvad.engine"),
    ("kvad.train", "kvad.lab"),
]

WITHOUT_TORCH = [
    "kvad",
    "kvad.__main__",
    "kvad.errors",
    "kvad.config.serialization",
    "kvad.config.layers",
    "kvad.config.plugins",
    "kvad.storage.temp_paths",
    "kvad.config.model",
    "kvad.model_input",
    "kvad.text",
    "kvad.cache.manager.kv_cache_manager",
    "kvad.cache.manager.swapped",
    "kvad.cache.manager.block_pool",
    "kvad.cache.manager.prefix_cache",
    "kvad.cache.config",
    "kvad.cache.manager.allocation",
    "kvad.cache.manager.block_mapping",
    "kvad.storage.filesystem",
    "kvad.storage.container",
    "kvad.storage.fingerprint",
    "kvad.cache.offload.ram_store",
    "kvad.cache.manager.prefix_offload",
    "kvad.cache.offload.pinned",
    "kvad.storage.byte_shuffle",
    "kvad.cache.offload.disk_store",
    "kvad.cache.offload.disk_store",
    "kvad.cache.offload.block_store",
    "kvad.storage.io_thread",
    "kvad.cache.config",
    "kvad.parallel.mesh",
    "kvad.parallel.partition",
    "kvad.cache.offload.swap_space",
    "kvad.cache.offload.swap_space",
    "kvad.cache.config",
    "kvad.parallel.partition",
    "kvad.cache.offload.token_offload",
    "kvad.cache.offload.token_offload",
    "kvad.cache.groups",
    "kvad.cache.sizing.memory_plan",
    "kvad.cache.sizing.activations",
    "kvad.cache.sizing.activations",
    "kvad.cache.manager.encoder_blocks",
    "kvad.cache.sessions.directory",
    "kvad.cache.manager.portable_layout",
    "kvad.config.parameter_shapes",
    "kvad.cache.sizing.system_memory",
    "kvad.engine.scheduling.preemption",
    "kvad.engine.scheduling.request",
    "kvad.engine.scheduling.sequence",
    "kvad.engine.scheduling.beam_search",
    "kvad.engine.scheduling.batching",
    "kvad.engine.scheduling.limits",
    "kvad.engine.scheduling.scheduler",
    "kvad.engine.scheduling.admission",
    "kvad.engine.scheduling.preemption",
    "kvad.checkpoint.folder",
    "kvad.planning.report",
    "kvad.planning.cache_presets",
    "kvad.planning.fit",
    "kvad.planning.group_summary",
    "kvad.planning.fit",
    "kvad.inspection.checkpoint",
    "kvad.inspection.model_tree",
    "kvad.inspection.model_tree",
    "kvad.inspection.model_tree",
    "kvad.config.flops",
    "kvad.datasets.synthetic",
    "kvad.benchmarks.needle_tasks",
    "kvad.datasets.stdlib_sources",
    "kvad.cli",
]

# Packages that are torch, or bring it.
TORCH = ("torch", "safetensors.torch", "transformers", "triton")

# Who may look up a module by a name that is only known at run time: the front door, the tables of commands and of
# families, and what loads classes of the user's own.
DYNAMIC_IMPORTS = ["kvad", "kvad.cli.main", "kvad.checkpoint.families", "kvad.config.plugins"]

KERNELS = {
    "scaled_dot_product_attention",
    "flex_attention",
    "MultiheadAttention",
    "sdpa_kernel",
    "cpp_extension",
    "triton",
}
COMPILERS = {"torch.compile", "torch.jit", "torch.cuda.CUDAGraph", "torch.cuda.graph"}
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLE_CALLS = {"torch.load", "torch.save", "torch.serialization"}
AMBIENT = {"contextvars.ContextVar", "threading.local", "ContextVar"}

MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_TYPES = {
    "list",
    "dict",
    "set",
    "bytearray",
    "deque",
    "defaultdict",
    "OrderedDict",
    "Counter",
    "WeakKeyDictionary",
}
MUTATORS = {"append", "extend", "insert", "pop", "popitem", "clear", "update", "add", "remove", "discard", "setdefault"}


@dataclass(frozen=True)
class Import:
    """One import: of module ``target`` (kvad's modules by their home), at load time or later, or for types only."""

    target: str
    line: int
    when: str  # "load", "call" or "types"


@dataclass
class House:
    """A tree of sources, parsed.  ``homes``: where the names live that the front door hands out."""

    tree: dict[str, str]
    homes: dict[str, str] = field(default_factory=dict)

    @cached_property
    def parsed(self) -> dict[str, ast.Module]:
        return {name: ast.parse(source) for name, source in sorted(self.tree.items())}

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        return {name: list(self._imports(name, parsed, "load")) for name, parsed in self.parsed.items()}

    def is_package(self, name: str) -> bool:
        return any(other.startswith(f"{name}.") for other in self.tree)

    def _imports(self, name: str, node: ast.AST, when: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, when)
            elif isinstance(child, ast.ImportFrom):
                yield from self._imports_from(name, child, when)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from self._imports(name, child, "types" if when == "types" else "call")
            elif isinstance(child, ast.If) and dotted(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                yield from self._imports(name, ast.Module(child.body, []), "types")
                yield from self._imports(name, ast.Module(child.orelse, []), when)
            else:
                yield from self._imports(name, child, when)

    def _imports_from(self, name: str, node: ast.ImportFrom, when: str) -> Iterator[Import]:
        base = node.module or ""
        if node.level:
            parts = name.split(".")
            above = parts[: len(parts) - node.level + self.is_package(name)]
            base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            if base == "kvad" and inner not in self.tree:
                if alias.name in self.homes:
                    yield Import(self.homes[alias.name], node.lineno, when)
                elif alias.name != "__version__":
                    yield Import("kvad", node.lineno, when)
            else:
                is_module = inner in self.tree or inner in TORCH
                yield Import(inner if is_module else base, node.lineno, when)


def read_house(root: Path, homes: dict[str, str]) -> House:
    """The house under ``root/kvad``."""
    tree = {}
    for path in sorted((root / "kvad").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        tree[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return House(tree, homes)


def dotted(node: ast.AST) -> str:
    """``torch.nn.functional`` of an expression that is a dotted name; else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def floor(name: str) -> tuple[str, int] | None:
    """The entry of FLOORS that holds a module: its longest prefix there (``kvad`` itself holds only itself)."""
    found = [prefix for prefix in FLOORS if within(name, prefix) and (prefix != "kvad" or name == "kvad")]
    return (max(found, key=len), FLOORS[max(found, key=len)]) if found else None


def arrows(house: House) -> Iterator[tuple[str, Import]]:
    """Every import of one part of kvad by another."""
    for name, imports in house.imports.items():
        for one in imports:
            if within(one.target, "kvad") and one.target != name:
                yield name, one


def homeless(house: House) -> list[str]:
    return [f"{name} stands on no floor: give it one in FLOORS" for name in house.tree if floor(name) is None]


def wrong_arrows(house: House) -> list[str]:
    """Imports upward, or sideways between two names of one floor."""
    objections = []
    for name, one in arrows(house):
        here, there = floor(name), floor(one.target)
        if here is None or there is None or here[0] == there[0] or here[1] > there[1]:
            continue
        way = "upward" if there[1] > here[1] else "sideways"
        objections.append(f"{name}:{one.line} imports {one.target}: {way}, floor {here[1]} to {there[1]}")
    return objections


def circles(house: House) -> list[str]:
    """Circles of imports, whatever the depth; each is named once, from its alphabetically first module."""
    graph: dict[str, set[str]] = {name: set() for name in house.tree}
    for name, one in arrows(house):
        if one.target in graph:
            graph[name].add(one.target)
    found: set[tuple[str, ...]] = set()
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            ring = path[path.index(name) :]
            first = ring.index(min(ring))
            found.add((*ring[first:], *ring[:first]))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return [f"a circle: {' -> '.join((*ring, ring[0]))}" for ring in sorted(found)]


def breached_walls(house: House) -> list[str]:
    return [
        f"{name}:{one.line} imports {one.target}: {who} never imports {whom}"
        for name, one in arrows(house)
        for who, whom in WALLS
        if within(name, who) and within(one.target, whom)
    ]


def torch_leaks(house: House) -> list[str]:
    """Modules of the no-torch list that load torch when they are imported, with the way it comes in."""
    objections = []
    for name in house.tree:
        if any(name == entry or (entry != "kvad" and within(name, entry)) for entry in WITHOUT_TORCH):
            way = _way_to_torch(house, name)
            if way:
                objections.append(f"{name} loads torch: {' -> '.join(way)}")
    return objections


def _way_to_torch(house: House, start: str) -> list[str]:
    """Load-time imports only; importing a module also loads the packages around it."""
    waiting, seen = [[start]], {start}
    while waiting:
        path = waiting.pop(0)
        targets = [one.target for one in house.imports.get(path[-1], []) if one.when == "load"]
        around = path[-1].split(".")
        targets += [".".join(around[:depth]) for depth in range(1, len(around))]
        for target in targets:
            if any(within(target, package) for package in TORCH):
                return [*path, target]
            if target not in seen and within(target, "kvad"):
                seen.add(target)
                waiting.append([*path, target])
    return []


def _uses(house: House) -> Iterator[tuple[str, int, str]]:
    """(module, line, dotted name) of everything that a module names or imports."""
    for name, parsed in house.parsed.items():
        for node in ast.walk(parsed):
            if isinstance(node, ast.Name | ast.Attribute) and dotted(node):
                yield name, node.lineno, dotted(node)
            elif isinstance(node, ast.Attribute):
                yield name, node.lineno, node.attr
            elif isinstance(node, ast.Import):
                yield from ((name, node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((name, node.lineno, f"{node.module or ''}.{alias.name}") for alias in node.names)


def stray_kernels(house: House) -> list[str]:
    """A kernel chosen outside ops/, or a compiler called outside ops/ and engine/runner.py."""
    objections = []
    for name, line, used in _uses(house):
        if not within(name, "kvad.ops") and KERNELS & set(used.split(".")):
            objections.append(f"{name}:{line} names {used}: only kvad/ops picks a kernel")
        if (
            not within(name, "kvad.ops")
            and name != "kvad.engine.execution.model_runner"
            and any(within(used, one) for one in COMPILERS)
        ):
            objections.append(f"{name}:{line} names {used}: only kvad/ops and engine/runner.py compile")
    return objections


def pickles(house: House) -> list[str]:
    objections = [
        f"{name}:{line} names {used}: no pickle, no torch.load"
        for name, line, used in _uses(house)
        if used.split(".")[0] in PICKLES or any(within(used, one) for one in PICKLE_CALLS)
    ]
    for name, parsed in house.parsed.items():
        keywords = (node for node in ast.walk(parsed) if isinstance(node, ast.keyword))
        objections += [f"{name} passes allow_pickle" for node in keywords if node.arg == "allow_pickle"]
    return objections


def dynamic_imports(house: House) -> list[str]:
    return [
        f"{name}:{line} names {used}: an import that no wall can see"
        for name, line, used in _uses(house)
        if used in ("__import__", "importlib.import_module", "runpy.run_module") and name not in DYNAMIC_IMPORTS
    ]


def ambient_state(house: House) -> list[str]:
    """Module-level state: a mutable value under a name that is not a constant's, a constant that is changed by a
    function, ``global``, context variables and thread-locals."""
    objections = [
        f"{name}:{line} names {used}: no current context" for name, line, used in _uses(house) if used in AMBIENT
    ]
    for name, parsed in house.parsed.items():
        tables = set()
        for target, value, line in _module_values(parsed):
            if _is_mutable(value):
                tables.add(target)
                if not target.isupper() and not (target.startswith("__") and target.endswith("__")):
                    objections.append(
                        f"{name}:{line} {target} is mutable: a table is ALL_CAPS, state lives in an object"
                    )
        for function in (node for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            objections += [f"{name}:{line} {what}" for line, what in _changes(function, tables)]
    return sorted(set(objections))


def _module_values(parsed: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    for node in parsed.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value, node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value, node.lineno


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return dotted(value.func).rpartition(".")[2] in MUTABLE_TYPES
    return isinstance(value, MUTABLE_LITERALS)


def _changes(function: ast.FunctionDef | ast.AsyncFunctionDef, tables: set[str]) -> Iterator[tuple[int, str]]:
    arguments = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    stores = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    shared = tables - arguments - stores
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and dotted(node.value) in shared:
            yield node.lineno, f"{function.name} changes {dotted(node.value)}"
        elif isinstance(node, ast.Call) and _is_mutation(node.func, shared):
            yield node.lineno, f"{function.name} changes {dotted(node.func).rpartition('.')[0]}"


def _is_mutation(called: ast.expr, tables: set[str]) -> bool:
    """``TABLE.update`` and its kind."""
    return isinstance(called, ast.Attribute) and called.attr in MUTATORS and dotted(called.value) in tables


def undocumented(house: House) -> list[str]:
    """Modules whose contract is not written, and folders without the file that would hold theirs."""
    around = {name.rpartition(".")[0] for name in house.tree} - {""}
    return [
        *(f"{name} has no docstring" for name, parsed in house.parsed.items() if not ast.get_docstring(parsed)),
        *(f"{name} has no __init__.py" for name in sorted(around - set(house.tree))),
    ]
