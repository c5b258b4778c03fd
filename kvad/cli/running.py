"""What the commands that run a model share: opening it with a cache to order, Ctrl-C, standard input, and statistics.

No torch until a model is opened.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvad.cache.formats import FORMATS
from kvad.cli.common import FORMAT, format_bytes
from kvad.cli.gave_way import gave_way, gave_way_lines
from kvad.cli.policies import park_ram_option, policies_asked, policy_options
from kvad.cli.tiers import TierUse, tier_lines, tier_options, tier_use, tiers_asked
from kvad.errors import DataError, counted

if TYPE_CHECKING:
    from kvad.cache.sizing import Group
    from kvad.engine.engine import Piece
    from kvad.engine.scheduler import Usage
    from kvad.engine.swaps import SwapStats
    from kvad.llm import LLM

__all__ = [
    "GroupUse",
    "Interrupt",
    "Meter",
    "RunStats",
    "cache_lines",
    "cache_options",
    "deterministic_option",
    "format_options",
    "formats_asked",
    "group_use",
    "open_llm",
]
__all__ += ["read_stdin", "stats_lines"]

Command = TypeVar("Command", bound=Callable[..., Any])
ENDS = {"max_tokens": "--max-tokens", "model": "the model's limit", "cache": "the cache's", "pool": "a full pool"}
DTYPES = ("float64", "float32", "bfloat16", "float16")
FORMAT_OPTIONS = (
    click.option(
        "--cache-dtype",
        metavar="FORMAT",
        type=FORMAT,
        help=f"What is stored: {', '.join(FORMATS)} [default: the model's].",
    ),
    click.option("--cache-keys", metavar="FORMAT", type=FORMAT, help="The same, of keys alone."),
    click.option("--cache-values", metavar="FORMAT", type=FORMAT, help="The same, of values alone."),
)


deterministic_option = click.option(
    "--deterministic", is_flag=True, help="The same bits alone and in any batch, on this machine (CPU; slower)."
)


def cache_options(command: Command) -> Command:
    options: list[Callable[[Any], Any]] = [
        click.option("--rows", type=int, help="Live sequences of the cache [default: as many as asked for, up to 8]."),
        click.option("--layout", type=click.Choice(["paged", "contiguous"]), help="[default: paged]"),
        *FORMAT_OPTIONS,
        click.option("--block-size", type=int, help="Slots of a block [default: 16]."),
        click.option("--context", type=int, help="Tokens of the longest row [default: the model's limit]."),
        click.option("--blocks", type=int, help="Blocks of the pool [default: for every row at its longest]."),
        park_ram_option,
        click.option(
            "--park-dir",
            metavar="FOLDER",
            type=click.Path(path_type=Path),
            help="Where rows go for which that is too little.",
        ),
        deterministic_option,
        policy_options,
        tier_options,
        click.option(
            "--compressor",
            metavar="FOLDER",
            type=click.Path(path_type=Path),
            help="What makes a hierarchy's summaries.",
        ),
        click.option(
            "--adapter",
            metavar="FOLDER",
            type=click.Path(path_type=Path),
            help="A LoRA adapter, kvad's or PEFT's, merged into the weights.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def format_options(command: Command) -> Command:
    """In which formats keys and values are stored."""
    for option in reversed(FORMAT_OPTIONS):
        command = option(command)
    return command


def formats_asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``cache_dtype``, ``cache_keys``, ``cache_values`` was said."""
    said = {name: options[name] for name in ("cache_dtype", "cache_keys", "cache_values")}
    return {name: value for name, value in said.items() if value is not None}


def open_llm(model: Path, options: Mapping[str, Any], *, rows: int) -> LLM:
    """Load a model with the cache that ``options`` ask for, of ``rows`` rows where they do not say.

    Raises CheckpointError, ConfigError or MemoryPlanError, each before the cache is allocated.
    """
    from kvad.llm import LLM

    asked = {
        "rows": options["rows"] if options["rows"] is not None else rows,
        "layout": options["layout"],
        "block_size": options["block_size"],
        "capacity": options["context"],
        "blocks": options["blocks"],
        "park_dir": options["park_dir"],
        "compressor": options["compressor"],
        "adapter": options["adapter"],
    }
    fields = {name: value for name, value in asked.items() if value is not None}
    chosen = {**formats_asked(options), **policies_asked(options), **tiers_asked(options)}
    return LLM.load(model, deterministic=options["deterministic"], **chosen, **fields)


def read_stdin() -> str:
    """All of standard input, as it is.  DataError names the first byte that is not UTF-8."""
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not UTF-8 at byte {error.start} (0x{raw[error.start]:02X})") from None


class Interrupt:
    """``with Interrupt() as stop``: the first Ctrl-C sets ``stop.asked``, so that a step in flight ends well; a second
    one raises KeyboardInterrupt.  In a thread that gets no signals it does nothing."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


# ---------------------------------------------------------------- statistics


@dataclass(frozen=True)
class GroupUse:
    """Blocks of one cache group: read by rows now, at the peak, kept for reuse, free, left free by admissions; and
    bytes, columns and scales included.  ``stored``: the format of its keys and values; ``form``: "hot", or what older
    tokens are there: "packed", "summarised", "spilled"."""

    layers: int
    window: int | None
    used: int
    peak: int
    evictable: int
    free: int
    watermark: int
    total: int
    block_bytes: int
    pool_bytes: int
    scale_bytes: int
    stored: str
    form: str = "hot"


@dataclass(frozen=True)
class Spilled:
    """Bytes of older tokens that were written and read, ``from_ram`` host memory and ``from_disk``; what the files in
    ``folder`` have come to; operations on them that ``failed``."""

    written: int
    from_ram: int
    from_disk: int
    on_disk: int
    failed: int
    folder: str | None


@dataclass(frozen=True)
class RunStats:
    """Seconds and milliseconds as named; ``engine_ms`` and ``model_ms`` are per generated token, over all rows.
    ``gave_way``: how rows were preempted, and what that costs here.
    ``ended``: samples, by what ended them: a limit ("max_tokens", "model", "cache", "pool"), or "stop" and the like."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float
    first_token: float
    tokens_per_second: float
    engine_ms: float
    model_ms: float
    steps: int
    cache: tuple[GroupUse, ...]
    prefix_hits: int
    prefix_misses: int
    preemptions: int
    gave_way: SwapStats
    evictions: int
    ended: Mapping[str, int]
    spilled: Spilled | None
    tiers: TierUse | None


def group_use(llm: LLM) -> tuple[GroupUse, ...]:
    """The cache as it is now, group by group; its peak since the last :class:`Meter` was made."""
    from kvad.cache.formats import joined
    from kvad.cache.sizing import group_bytes

    ledger, made = llm.engine.ledger, []
    stats = ledger.stats()
    for index, group in enumerate(ledger.groups):
        size = group_bytes(group)
        made.append(
            GroupUse(
                layers=len(group.layers),
                window=group.mixer.window,
                used=stats.used[index],
                peak=stats.peak[index],
                evictable=stats.evictable[index],
                free=stats.free[index],
                watermark=stats.watermark[index],
                total=stats.total[index],
                block_bytes=size.total // group.blocks,
                pool_bytes=size.total,
                scale_bytes=size.scales,
                stored=joined(group.keys, group.values),
                form=_form(group),
            )
        )
    return tuple(made)


def _form(group: Group) -> str:
    if group.level is None:
        return "hot"
    return "spilled" if group.level.spilled else "packed" if group.level.ratio == 1 else "summarised"


def spilled(llm: LLM) -> Spilled | None:
    """Since the engine started; None for a cache that spills nothing."""
    spill = llm.engine.memory.spill
    if spill is None:
        return None
    stats = spill.stats()
    folder = None if stats.folder is None else str(stats.folder)
    return Spilled(stats.written, stats.from_ram, stats.from_disk, stats.on_disk, stats.failed, folder)


class Meter:
    """Counts one run: make it before the first request, show it every piece, ask it at the end."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._times, self._ledger = replace(llm.engine.times), llm.engine.ledger.stats()
        self._swaps = llm.engine.swaps.stats()
        llm.engine.ledger.restart_peak()
        self._before = spilled(llm)
        self._usages: dict[int, Usage] = {}
        self._ended: Counter[str] = Counter()
        self._tokens = 0
        self._began, self._first = time.perf_counter(), 0.0

    def see(self, piece: Piece) -> None:
        if piece.request not in self._usages:
            self._usages[piece.request] = self._llm.engine.usage(piece.request)
        if piece.token is not None:
            self._tokens += 1
            self._first = self._first or time.perf_counter()
        if piece.finish is not None:
            self._ended[piece.limit or piece.finish] += 1

    def usage(self, request: int) -> Usage:
        return self._usages[request]

    def stats(self) -> RunStats:
        end, times, ledger = time.perf_counter(), self._llm.engine.times, self._llm.engine.ledger.stats()
        first = self._first or end
        model, total = times.model - self._times.model, times.total - self._times.total
        usages = self._usages.values()
        return RunStats(
            prompt_tokens=sum(usage.prompt for usage in usages),
            cached_tokens=sum(usage.cached for usage in usages),
            completion_tokens=self._tokens,
            seconds=end - self._began,
            first_token=first - self._began,
            tokens_per_second=(self._tokens - 1) / (end - first) if self._tokens > 1 else 0.0,
            engine_ms=1e3 * (total - model) / max(1, self._tokens),
            model_ms=1e3 * model / max(1, self._tokens),
            steps=times.steps - self._times.steps,
            cache=group_use(self._llm),
            prefix_hits=ledger.hits - self._ledger.hits,
            prefix_misses=ledger.misses - self._ledger.misses,
            preemptions=sum(usage.preemptions for usage in usages),
            gave_way=gave_way(self._swaps, self._llm.engine.swaps.stats()),
            evictions=sum(ledger.evictions) - sum(self._ledger.evictions),
            ended=dict(self._ended),
            spilled=self._spilled(),
            tiers=tier_use(self._llm),
        )

    def _spilled(self) -> Spilled | None:
        now, before = spilled(self._llm), self._before
        if now is None or before is None:
            return now
        moved = {
            name: getattr(now, name) - getattr(before, name) for name in ("written", "from_ram", "from_disk", "failed")
        }
        return replace(now, **moved)


def stats_lines(stats: RunStats) -> list[str]:
    tokens = counted(stats.completion_tokens, "token")
    return [
        f"prompt     {counted(stats.prompt_tokens, 'token')}, {stats.cached_tokens} of them from the prefix cache",
        f"generated  {tokens} in {stats.seconds:.3f} s, {counted(stats.steps, 'step')}",
        f"speed      {stats.tokens_per_second:.1f} tokens/s, the first token after {1e3 * stats.first_token:.1f} ms",
        f"per token  {stats.model_ms:.2f} ms in the model, {stats.engine_ms:.3f} ms in the engine",
        *(f"cache      {line}" for line in cache_lines(stats.cache)),
        *([] if stats.spilled is None else [f"spilled    {_spill_line(stats.spilled)}"]),
        f"prefix     {counted(stats.prefix_hits, 'hit')}, {counted(stats.prefix_misses, 'miss', 'misses')}",
        *tier_lines(stats.tiers),
        f"pressure   {counted(stats.preemptions, 'preemption')}, {counted(stats.evictions, 'eviction')}",
        *(f"preempted  {line}" for line in gave_way_lines(stats.gave_way)),
        f"ended      {', '.join(f'{count} by {ENDS.get(by, by)}' for by, count in stats.ended.items()) or 'nothing'}",
    ]


def cache_lines(groups: tuple[GroupUse, ...]) -> list[str]:
    """One line per group of layers."""
    return [_cache_line(use) for use in groups]


def _cache_line(use: GroupUse) -> str:
    scales = f", {format_bytes(use.scale_bytes)} of it scales" if use.scale_bytes else ""
    what = "all tokens" if use.window is None else f"window of {use.window}"
    return (
        f"{counted(use.layers, 'layer')}, {what if use.form == 'hot' else f'older tokens, {use.form}'}: "
        f"{use.used} of {counted(use.total, 'block')} in use, {use.evictable} kept for reuse, {use.free} free "
        f"(watermark {use.watermark}); "
        f"peak {use.peak} = {format_bytes(use.peak * use.block_bytes)} of {format_bytes(use.pool_bytes)} "
        f"in {use.stored}{scales}"
    )


def _spill_line(spill: Spilled) -> str:
    where = "" if spill.folder is None else f", {format_bytes(spill.from_disk)} from disk"
    files = "" if spill.folder is None else f"; {format_bytes(spill.on_disk)} of files in {spill.folder}"
    failed = f"; {counted(spill.failed, 'operation')} on the disk failed" if spill.failed else ""
    return (
        f"{format_bytes(spill.written)} written, {format_bytes(spill.from_ram)} read from memory{where}{files}{failed}"
    )
