"""Engines on a mesh: this process is rank 0, the other ranks are child processes that it starts and ends.

``MeshRanks`` shards copies of the models here and in the children (gloo on 127.0.0.1, weights through a temporary
folder). With each engine's cache, the children receive its configuration and summarizer; then they follow it like any
other ranks. The reference is the whole model in this process, so it shares neither shards nor sums with the engine.

An attention hook would see the heads of one rank, so ``MeshRanks.diagnose`` compares the keys and values that all ranks
have stored with those of the reference, head by head.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvad import cache as cache_lib
from kvad import checkpoint, ops, parallel
from kvad.cache import CacheConfig
from kvad.cache.device import KVCache
from kvad.config import attention_specs
from kvad.engine import EngineConfig
from kvad.engine.scheduling import SchedulerOutput
from kvad.errors import ConfigError, EngineError, UsageError
from kvad.model import Summarizer, Transformer
from kvad.verify import mismatch
from kvad.verify.injected_faults import give_heads_of_first_rank
from kvad.verify.reference_model import ReferenceModel
from kvad.verify.replay import ReplayEngine, ReplayStream
from kvad.verify.report import UNKNOWN_FAULT, MismatchFinding

CONNECT_SECONDS = 120.0  # for a rank to load its weights and connect
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of stored keys and values, relative to the largest


class MeshRanks(contextlib.AbstractContextManager["MeshRanks"]):
    """The ranks of a mesh for several engines in turn; the children end with the ``with`` block.

    Args:
        mesh: The mesh.
        models: The models that run, of one configuration; they are copied, and their experts joined.
        fault: "rank-heads", or any fault that is not one of the ranks.

    Raises:
        EngineError: If a rank does not start.
    """

    def __init__(self, mesh: parallel.Mesh, models: Sequence[Transformer], fault: str | None = None) -> None:
        self.mesh, self._models = mesh, list(models)
        self._children: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="kvad-verify-mesh-")
        folder = Path(self._folder.name)
        try:
            models[0].join_experts()
            checkpoint.native.save_checkpoint(folder / "model", models[0].config, models[0].state_dict(), None)
            dtypes = [model.dtype_name for model in models]
            for rank in range(1, mesh.size):
                arguments = [str(folder), str(mesh), str(rank), fault or "none", *dtypes]
                command = [sys.executable, "-m", "kvad.verify.mesh", *arguments]
                self._children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
            self.groups = _connect(mesh, folder)
            self._shards = [copy.deepcopy(model) for model in models]
            for shard in self._shards:
                parallel.shard_model(shard, self.groups)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        self._folder.cleanup()

    def prepare(self, model: Transformer, cache: CacheConfig, config: EngineConfig) -> tuple[Transformer, EngineConfig]:
        """Return the parts of an engine of ``model``, which the other ranks follow from when it builds its cache."""
        if any(child.poll() is not None for child in self._children):
            raise EngineError("a rank of the mesh has ended", "Its error is printed above.")
        index = next(number for number, each in enumerate(self._models) if each is model)
        shard, summarizer = self._shards[index], config.summarizer
        build = parallel.leader_cache_factory(shard, self.groups)

        def announce(groups: Sequence[cache_lib.CacheGroup], **options: Any) -> KVCache:
            kv_cache = build(groups, **options)  # refuses what a mesh cannot do before the children build theirs
            trained = None if summarizer is None else [summarizer.ratio, summarizer.hidden, summarizer.state_dict()]
            message = parallel.process_groups.Message("engine", [index, dataclasses.asdict(cache), trained])
            parallel.process_groups.send(message, self.groups.broadcast_from_first_rank)
            return kv_cache

        return shard, dataclasses.replace(config, cache_factory=announce)

    def diagnose(
        self, model: Transformer, cache: CacheConfig, stream: ReplayStream, reference: ReferenceModel
    ) -> MismatchFinding | None:
        """Compare the keys and values that the ranks store for one sequence with the reference, and name the fault.

        Returns:
            None if they are right.
        """
        fields: dict[str, Any] = {"dtype": model.dtype_name, "key_dtype": None, "value_dtype": None, "num_blocks": None}
        fields |= {"policy": "full", "endless": False, "rope_at": "write", "enable_prefix_caching": False}
        fields |= {"prefix_cache_ram": None}
        cache = dataclasses.replace(cache, **fields)
        stream = stream._replace(forced_tokens=stream.forced_tokens[:1], after=None)
        latest: list[SchedulerOutput] = []
        stored: dict[str, Tensor] = {}
        num_tokens = len(stream.prompt)
        shard, config = self.prepare(model, cache, EngineConfig())
        with ReplayEngine(shard, cache, [stream], config, watch=latest.append) as run:

            def read(_step: int) -> None:
                if stored or not latest:  # no step of the decoder yet
                    return
                if latest[-1].scheduled[0].start + latest[-1].scheduled[0].num_tokens == num_tokens:
                    tables = [list(tables[0]) for tables in latest[-1].allocation.block_tables]
                    stored.update(run.engine.kv_cache.read_blocks(tables))

            run.submit(0)
            run.run(read)
            groups = run.engine.kv_cache.all_groups
        layers = mismatch.reference_layers(reference, stream, 0, _specs(groups), exact=False)
        for layer, true in enumerate(layers):
            group = next(index for index, each in enumerate(groups) if layer in each.layers)
            positions = stored[f"{group}.positions"].flatten()
            held = (positions >= 0) & (positions < num_tokens)
            for what, kind, want in (("k", "keys", true.k), ("v", "values", true.v)):
                array = stored[f"{group}.{layer}.{kind}.0"].transpose(1, 2).flatten(0, 1)  # [slots, K, D]
                have, want = array[held].transpose(0, 1).double(), want[:, positions[held]].double()
                finding = self._wrong_heads(layer, what, have, want, CLOSE.get(model.token_embedding.dtype, 0.1))
                if finding is not None:
                    return finding
        return None

    def _wrong_heads(self, layer: int, what: str, have: Tensor, want: Tensor, close: float) -> MismatchFinding | None:
        """Return the first head that differs, in [K, T, D], and the head that it is equal to."""
        scale = float(want.abs().max())
        gaps = (have[:, None] - want[None]).abs().nan_to_num(nan=torch.inf).amax(dim=(2, 3)) / scale  # [K, K]
        wrong = (gaps.diagonal() > close).nonzero().flatten().tolist()
        if not wrong:
            return None
        head, other = wrong[0], int(gaps[wrong[0]].argmin())
        ranks = [self._rank_of(index, len(want)) for index in (head, other)]
        fault, label = UNKNOWN_FAULT, {"k": "keys", "v": "values"}[what]
        evidence = f"the {label} of head {head}, on rank {ranks[0]}, are those of no head"
        if float(gaps[head, other]) <= close:
            fault = "rank-heads"
            evidence = f"the {label} of head {head}, on rank {ranks[0]}, are those of head {other}, on rank {ranks[1]}"
        return MismatchFinding(fault, layer, 0, 0, 0, what, float(gaps[head, head]) * scale, evidence)

    def _rank_of(self, head: int, num_heads: int) -> int:
        heads = [parallel.mesh.kv_head_range(num_heads, rank) for rank in self.mesh.all_ranks()]
        return next(rank for rank, own in enumerate(heads) if head in own)


def check_mesh(model: Transformer, mesh: parallel.Mesh | None, config: EngineConfig) -> None:
    """Check that an engine of ``model`` can be divided among ranks, before anything is computed.

    Raises:
        ConfigError: If the model cannot be divided, or a sum over ranks would not be deterministic.
        UsageError: If the model is not on a CPU, where the other ranks run.
    """
    if mesh is None:
        return
    parallel.mesh.check_model_fits_mesh(model.config, mesh)
    if config.deterministic:
        raise ConfigError(f"deterministic: is not supported on a mesh of {mesh}, which splits sums between ranks")
    if config.compile:
        raise ConfigError(f"compile: is not supported on a mesh of {mesh}", "Omit it.")
    if any(isinstance(layer, ops.quantized_linear.QuantizedLinear) for layer in model.modules()):
        message = f"weights: int8 and int4 are not supported on a mesh of {mesh}"
        raise ConfigError(message, "Give the original checkpoint.")
    device = model.token_embedding.device
    if device.type != "cpu":
        raise UsageError(f"--device: must be cpu with --mesh {mesh}, whose ranks are processes here, got {device}")


def _specs(groups: Sequence[cache_lib.CacheGroup]) -> list[Any]:
    """Return the attention of each layer, in order."""
    by_layer = {layer: group.spec for group in groups for layer in group.layers}
    return [by_layer[layer] for layer in sorted(by_layer)]


def _connect(mesh: parallel.Mesh, folder: Path) -> Any:
    store = dist.FileStore(str(folder / "store"), mesh.size)  # type: ignore[attr-defined]
    try:
        return parallel.connect_groups(mesh, store, timeout=CONNECT_SECONDS)
    except RuntimeError as error:
        raise EngineError(f"a rank of the mesh of {mesh} did not start", "Its error is printed above.") from error


@torch.inference_mode()
def follow(folder: Path, mesh: parallel.Mesh, fault: str, dtypes: Sequence[str]) -> None:
    """Run a rank other than the first, until its parent ends it."""
    groups = _connect(mesh, folder)
    models = []
    for dtype in dtypes:
        model = checkpoint.loader.load_weights(checkpoint.open_checkpoint(folder / "model"), dtype)
        if fault == "rank-heads":
            give_heads_of_first_rank(model, mesh)
        parallel.shard_model(model, groups)
        models.append(model)
    while True:
        message = parallel.process_groups.receive(groups.broadcast_from_first_rank)
        index, fields, trained = message.payload
        model, summarizers = models[index], None
        if trained is not None:
            ratio, hidden, state = trained
            summarizer = Summarizer(attention_specs(model.config), ratio, hidden)
            summarizer.load_state_dict(state)
            summarizers = summarizer.by_layer()
        cache = parallel.build_follower_cache(model, CacheConfig(**fields), groups, summarizers=summarizers)
        parallel.run_follower(model, cache)


if __name__ == "__main__":
    folder_name, mesh_name, rank_name, fault_name, *dtype_names = sys.argv[1:]
    torch.set_num_threads(1)
    follow(Path(folder_name), parallel.Mesh.parse(mesh_name).with_rank(int(rank_name)), fault_name, dtype_names)
