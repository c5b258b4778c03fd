"""Build hook: compiles the CPU kernels when a wheel or an editable install is built (kvad/ops/native/build.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = Path("kvad", "ops", "native", "build.py")


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds the compiled libraries to the wheel; without a compiler the wheel has none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into the source tree, where an editable install finds the libraries."""
        if self.target_name != "wheel":
            return
        spec = importlib.util.spec_from_file_location("kvad_native_build", Path(self.root, SCRIPT))
        assert spec is not None and spec.loader is not None
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        libraries = script.build()
        if libraries:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["artifacts"] += [str(path.relative_to(self.root)) for path in libraries]
