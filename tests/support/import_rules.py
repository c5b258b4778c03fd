"""Import rules of kvad (docs/contributing/architecture.md) as functions that return one line per violation.

A ``Source`` is a mapping from module names to source text, so a test can pass a small tree that breaks a rule.
Imports through a package's door (``__init__.py``) are resolved to the file that defines the name.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Lowest layer first. An import goes to a lower layer or stays within its own package.
LAYERS = (
    {"_html", "_lazy", "_log", "errors"},
    {"model_input"},
    {"storage"},
    {"config", "text", "datasets"},
    {"ops"},
    {"model", "cache"},
    {"checkpoint", "parallel"},
    {"engine", "train"},
    {"llm", "planning"},
    {"inspection"},
    {"benchmarks"},
    {"verify"},
    {"evaluation"},
    {"api"},
    {"server"},
    {"cli"},
    {"", "__main__"},
)
# The same inside three packages; "" holds the files of the package itself.
INNER_LAYERS = {
    "cache": ({""}, {"manager"}, {"offload"}, {"device", "sizing"}, {"sessions"}),
    "engine": ({"scheduling"}, {"execution"}, {""}),
    "train": ({"config"}, {"optim", "sources"}, {"data"}, {"objectives", "monitoring"}, {"setup"}, {"loop"}),
}
FORBIDDEN = (("model", "cache"), ("cache", "model"), ("train", "cache"), ("train", "engine"))
TORCH_FREE = [
    "config",
    "storage",
    "text",
    "datasets",
    "cache",
    "cache.manager",
    "cache.offload",
    "cache.sizing",
    "engine.scheduling",
    "planning",
    "train.config",
    "train.sources",
    "cli",
    "cli.commands",
]
TORCH_FREE_FILES = [
    "cache.sessions.directory",
    "checkpoint.folder",
    "checkpoint.safetensors_header",
    "parallel.mesh",
    "parallel.partition",
    "inspection.checkpoint",
    "inspection.model_tree",
    "benchmarks.needle_tasks",
    "errors",
    "model_input",
]
MAX_FILES, MAX_CHAIN = 14, 9
WIDE_FOLDERS = ("checkpoint.families", "cli.commands")
DYNAMIC_IMPORTS = ("kvad", "kvad._lazy", "kvad.cli.main", "kvad.checkpoint.families", "kvad.config.plugins")
KERNELS = {"scaled_dot_product_attention", "flex_attention", "sdpa_kernel", "cpp_extension", "triton"}
COMPILERS = {"torch.compile", "torch.jit", "torch.cuda.CUDAGraph"}
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.load", "torch.save"}
PLAIN_TENSORS = ("torch.load", "kvad.checkpoint.safetensors_io")  # with weights_only: tensors of old files
REGISTRIES = ("kvad.config.plugins",)  # what the user registered in this process
CONTEXTS = {"contextvars.ContextVar", "ContextVar", "threading.local"}
MUTABLE_TYPES = {"list", "dict", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter"}


@dataclass(frozen=True)
class Import:
    """An import of ``target`` in ``line``; ``at_load`` is False inside functions and for type checking."""

    target: str
    line: int
    at_load: bool


class Source:
    """A parsed tree of modules."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.trees = {name: ast.parse(text) for name, text in sorted(texts.items())}
        self.packages = {name for name in texts if any(other.startswith(f"{name}.") for other in texts)}

    @classmethod
    def read(cls, root: Path) -> "Source":
        texts = {}
        for path in (root / "kvad").rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            texts[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
        return cls(texts)

    @cached_property
    def doors(self) -> dict[str, dict[str, str]]:
        """Map each package to its public names and their modules, from the door's imports for type checking."""
        return {
            package: {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                if f"{node.module}.{alias.name}" in self.trees
                else node.module or ""
                for node in ast.walk(self.trees[package])
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            for package in self.packages
        }

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        """Map each module to its imports as written, without looking through doors."""
        return {name: list(self._imports(name, tree, at_load=True)) for name, tree in self.trees.items()}

    @cached_property
    def files(self) -> dict[str, list[Import]]:
        """Map each module to its imports, resolved to files (names of doors, ``package.file.name`` expressions)."""
        return {name: list(self._resolved(name)) for name in self.trees if name not in self.packages}

    def _imports(self, name: str, node: ast.AST, *, at_load: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, at_load) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parts = name.split(".")
                    above = parts[: len(parts) - child.level + (name in self.packages)]
                    base = ".".join([*above, *([child.module] if child.module else [])])
                for alias in child.names:
                    full = f"{base}.{alias.name}"
                    if full == "kvad.__version__":
                        continue
                    yield Import(full if full in self.trees or base == "safetensors" else base, child.lineno, at_load)
            elif isinstance(child, ast.If) and dotted(child.test).endswith("TYPE_CHECKING"):
                yield from self._imports(name, ast.Module(child.body, []), at_load=False)
                yield from self._imports(name, ast.Module(child.orelse, []), at_load=at_load)
            else:
                inner = at_load and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from self._imports(name, child, at_load=inner)

    def _resolved(self, name: str) -> Iterator[Import]:
        yield from (each for each in self.imports[name] if each.target not in self.packages)
        tree = self.trees[name]
        aliases = {  # import kvad.verify as verify
            alias.asname: alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.asname and alias.name in self.packages
        }
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
            door = self.doors.get(node.module or "", {})
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in self.packages:
                    aliases[alias.asname or alias.name] = full
                elif alias.name in door and full not in self.trees:
                    yield Import(door[alias.name], node.lineno, self._at_load(name, node))
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Attribute)):
            if isinstance(node.value, ast.Name) and node.value.id in aliases:
                target = self.doors[aliases[node.value.id]].get(node.attr)
                if target is not None:
                    yield Import(target, node.lineno, at_load=False)

    def _at_load(self, name: str, node: ast.ImportFrom) -> bool:
        return any(each.line == node.lineno and each.at_load for each in self.imports[name])


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for a dotted name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


def _within(source: Source) -> Iterator[tuple[str, Import]]:
    for name, imports in source.imports.items():
        yield from ((name, one) for one in imports if one.target.split(".")[0] == "kvad" and one.target != name)


def _part(name: str, depth: int) -> str:
    parts = name.split(".")
    return parts[depth] if len(parts) > depth else ""


def _rank(layers: tuple[set[str], ...], part: str) -> int | None:
    return next((rank for rank, layer in enumerate(layers) if part in layer), None)


def upward_imports(source: Source) -> list[str]:
    """List imports that go up, between packages of one layer, or to a module without a layer."""
    violations = []
    for name, one in _within(source):
        here, there = _part(name, 1), _part(one.target, 1)
        ranks = _rank(LAYERS, here), _rank(LAYERS, there)
        if here == there and here in INNER_LAYERS:
            inner = [_part(module, 2) for module in (name, one.target)]
            packages = [f"kvad.{here}.{part}" in source.packages for part in inner]
            parts = [part if is_package else "" for part, is_package in zip(inner, packages, strict=True)]
            ranks = tuple(_rank(INNER_LAYERS[here], part) for part in parts)  # type: ignore[assignment]
            here, there = parts
        if None in ranks or (here != there and ranks[1] >= ranks[0]):  # type: ignore[operator]
            violations.append(f"{name}:{one.line} imports {one.target}, which is not in a lower layer")
    return violations


def forbidden_imports(source: Source) -> list[str]:
    """List imports between packages that must be independent."""
    pairs = ((name, one, (_part(name, 1), _part(one.target, 1))) for name, one in _within(source))
    return [f"{name}:{one.line} imports {one.target}" for name, one, pair in pairs if pair in FORBIDDEN]


def circles(source: Source) -> list[str]:
    """List circular imports between files, at any depth of a function and for types."""
    graph = {name: {one.target for one in imports} & source.files.keys() for name, imports in source.files.items()}
    return [f"circular import: {' -> '.join(circle)}" for circle in _walk(graph)[1]]


def long_chains(source: Source) -> list[str]:
    """List folders in which one file loads too many others through imports."""
    violations = []
    for folder in {name.rpartition(".")[0] for name in source.files}:
        inside = {name for name in source.files if name.rpartition(".")[0] == folder}
        graph = {name: {one.target for one in source.files[name] if one.at_load} & inside for name in inside}
        longest = _walk(graph)[0]
        if longest > MAX_CHAIN:
            violations.append(f"{folder} has an import chain of {longest} files, at most {MAX_CHAIN}")
    return violations


def _walk(graph: Mapping[str, set[str]]) -> tuple[int, list[list[str]]]:
    depths: dict[str, int] = {}
    chains: list[list[str]] = []

    def depth(name: str, path: tuple[str, ...]) -> int:
        if name in path:
            chains.append([*path[path.index(name) :], name])
            return 0
        if name not in depths:
            depths[name] = 1 + max((depth(other, (*path, name)) for other in sorted(graph[name])), default=0)
        return depths[name]

    return max((depth(name, ()) for name in sorted(graph)), default=0), chains


def imports_past_a_door(source: Source) -> list[str]:
    """List direct imports of a file in a folder that is neither the importer's own nor above it."""
    violations = []
    for name, one in _within(source):
        folder = name if name in source.packages else name.rpartition(".")[0]
        target = one.target.rpartition(".")[0]
        if one.target not in source.packages and target != "kvad" and not f"{folder}.".startswith(f"{target}."):
            violations.append(f"{name}:{one.line} imports {one.target}: import from {target}")
    return violations


def crowded_folders(source: Source) -> list[str]:
    """List folders with too many files."""
    violations = []
    for package in source.packages:
        files = [name for name in source.files if name.rpartition(".")[0] == package and "__" not in name]
        if len(files) > MAX_FILES and package.removeprefix("kvad.") not in WIDE_FOLDERS:
            violations.append(f"{package} has {len(files)} files, at most {MAX_FILES}")
    return violations


def is_torch_free(source: Source, name: str) -> bool:
    """True if a module must not load torch when it is imported."""
    inner = name.removeprefix("kvad").removeprefix(".")
    folder = inner if name in source.packages else inner.rpartition(".")[0]
    is_door = name in source.packages and inner != "checkpoint.families"  # its table imports the conversion types
    return inner in TORCH_FREE_FILES or folder in TORCH_FREE or is_door


def torch_imports(source: Source) -> list[str]:
    """List torch-free modules that load torch, with the chain of imports."""
    loads = {name: [each.target for each in imports if each.at_load] for name, imports in source.imports.items()}
    loads |= {name: [each.target for each in imports if each.at_load] for name, imports in source.files.items()}
    violations = []
    for start in (name for name in source.trees if is_torch_free(source, name)):
        waiting, seen = [(start,)], {start}
        while waiting:
            path = waiting.pop(0)
            for target in loads.get(path[-1], ()):
                if target.split(".")[0] in ("torch", "transformers", "triton") or target == "safetensors.torch":
                    violations.append(f"{' -> '.join((*path, target))}: {start} must not load torch")
                elif target not in seen:
                    seen.add(target)
                    waiting.append((*path, target))
    return violations


def _uses(source: Source) -> Iterator[tuple[str, int, str]]:
    for name, tree in source.trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                yield name, node.lineno, dotted(node) or getattr(node, "attr", "")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                yield from ((name, node.lineno, f"{base}{alias.name}") for alias in node.names)


def misplaced_uses(source: Source) -> list[str]:
    """List kernels outside ``ops``, pickle, imports by computed names, and context variables."""
    violations = []
    for name, line, used in _uses(source):
        kernel = bool(KERNELS & set(used.split("."))) or any(used.startswith(one) for one in COMPILERS)
        if kernel and not name.startswith("kvad.ops") and name != "kvad.engine.execution.model_runner":
            violations.append(f"{name}:{line} uses {used}: only kvad.ops chooses kernels")
        if (used in PICKLES or used.split(".")[0] in PICKLES) and (used, name) != PLAIN_TENSORS:
            violations.append(f"{name}:{line} uses {used}: no pickle")
        if used in ("importlib.import_module", "__import__") and name not in DYNAMIC_IMPORTS:
            violations.append(f"{name}:{line} uses {used}: no dynamic import")
        if used in CONTEXTS:
            violations.append(f"{name}:{line} uses {used}: no global context")
    return violations


def mutable_globals(source: Source) -> list[str]:
    """List mutable module values that are not constants, and functions that change module state."""
    violations = []
    for name, tree in source.trees.items():
        if name in REGISTRIES:
            continue
        tables = set()
        for node in tree.body:
            value = getattr(node, "value", None)
            if not isinstance(node, ast.Assign | ast.AnnAssign) or value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            called = dotted(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
            if (
                isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
                or called in MUTABLE_TYPES
            ):
                tables |= {dotted(target) for target in targets}
        violations += [f"{name}: {table} is mutable" for table in tables if not table.isupper() and table[:2] != "__"]
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            violations += [
                f"{name}:{line} {function.name} changes {table}" for line, table in _changes(function, tables)
            ]
    return violations


def _changes(function: ast.AST, tables: set[str]) -> Iterator[tuple[int, str]]:
    own = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    own |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    changing = {"append", "extend", "insert", "pop", "clear", "update", "add", "remove", "discard", "setdefault"}
    for node in ast.walk(function):
        table = ""
        if isinstance(node, ast.Global):
            yield node.lineno, ", ".join(node.names)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            table = dotted(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in changing:
            table = dotted(node.func.value)
        if table in tables - own:
            yield node.lineno, table  # type: ignore[attr-defined]


RULES = (
    upward_imports,
    forbidden_imports,
    circles,
    long_chains,
    imports_past_a_door,
    crowded_folders,
    torch_imports,
    misplaced_uses,
    mutable_globals,
)
