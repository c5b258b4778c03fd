"""The cache trace as text and as one HTML file.

The text is a map of signs, one per token, that needs no color and no terminal. Equal layers and heads are drawn once.
If there are more tokens than columns, neighbors share a cell that shows the most common state; lists that are
shortened state their full length.

The HTML file (map, text, blocks, block tables and a slider over the steps) is self-contained (``kvad/_html.py``):
``trace_html.*`` and the report as JSON are embedded. Without scripts a reader gets the terminal's map.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from kvad._html import notebook_frame, self_contained_page
from kvad.errors import format_count
from kvad.inspection import trace_report
from kvad.inspection.attention_plot import ruler
from kvad.inspection.model_tree import fold_indices
from kvad.inspection.trace_report import STATES, GroupReport, GroupTrace, SequenceReport, TraceReport

BAR_CHARS = "▁▂▃▄▅▆▇█"
MAX_LINES = 64  # of one sequence: beyond, heads are drawn together


def trace_to_text(
    report: TraceReport,
    *,
    width: int = 100,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    tokens: Sequence[int] = (),
    most: int = 8,
) -> str:
    """Draw a map of every sequence at its end, without a final newline.

    Args:
        layers, heads: Those to draw (None: all).
        tokens: Positions whose history is printed; without any, that of the ``most`` evicted ones with most attention.
    """
    parts = [f"{report.model}: {report.policy}, {report.layout}, {format_count(len(report.steps), 'step')}"]
    parts += [f"  {line}" for line in _groups(report)]
    parts += ["  at the end", *(f"    {place.text}" for place in report.storage)] if report.storage else []
    for number, sequence in enumerate(report.rows):
        lines = [
            line
            for line in sequence.lines
            if (layers is None or {*layers} & {*line.layers}) and (heads is None or line.head in (None, *heads))
        ]
        parts += ["", *_heading(number, sequence), *_map(sequence, lines, width), *_legend(sequence, lines)]
        parts += _blocks(sequence, report.groups, {layer for line in lines for layer in line.layers})
        parts += [f"  step {event.step}: {event.text}" for event in sequence.events]
        parts += _token_histories(sequence, lines, tokens) if tokens else _top_evicted(sequence, lines, most)
    return "\n".join(line.rstrip() for line in parts)


def _groups(report: TraceReport) -> Iterator[str]:
    for number, group in enumerate(report.groups):
        peak = max((step.used[number] for step in report.steps), default=0)
        content = {"hot": group.policy, "summarized": "summaries"}.get(group.state, group.state)
        yield (
            f"{format_indices('layer', group.layers)}: {content}, {group.stored}, blocks of {group.block_size}, "
            f"{peak} of {group.blocks} used at the peak"
        )


def format_indices(name: str, indices: Collection[int]) -> str:
    """Format ``layer 3`` or ``layers 0-3, 5``."""
    return f"{name}{'s' if len(indices) > 1 else ''} {fold_indices(indices)}"


def _heading(number: int, sequence: SequenceReport) -> Iterator[str]:
    sample = f", sample {sequence.sample}" if sequence.sample else ""
    origin = f", {sequence.num_prefix_hits} of them found in the prefix cache" if sequence.num_prefix_hits else ""
    origin += f", {sequence.restored} of them restored" if sequence.restored else ""
    ended = f", ended by {sequence.finish}" if sequence.finish else ""
    prompt = format_count(sequence.prompt, "token")
    generated = len(sequence.tokens) - sequence.prompt
    yield f"sequence {number}{sample}: {prompt} of prompt{origin}, {generated} generated{ended}"
    if sequence.error:
        yield f"  {sequence.error}"


def _map(sequence: SequenceReport, lines: Sequence[GroupTrace], width: int) -> Iterator[str]:
    """Draw one line per different state sequence; a cell has as many tokens as the width requires."""
    drawn = list(_merged_lines(lines, sequence))
    margin = max(len(label) for label in ("attention", *dict(drawn))) + 4
    per_cell = max(1, -(-len(sequence.tokens) // max(8, width - margin)))
    cells = range(0, len(sequence.tokens), per_cell)
    if per_cell > 1:
        yield f"  a cell is {per_cell} tokens and shows how most of them are"
    yield " " * margin + ruler(len(cells), per_cell)
    for label, states in drawn:
        yield f"  {label}".ljust(margin) + "".join(_most_common_state(states[at : at + per_cell]) for at in cells)
    mass = _mass(sequence, lines)
    yield "  attention".ljust(margin) + bar_signs([sum(mass[at : at + per_cell]) for at in cells])


def bar_signs(shares: Sequence[float]) -> str:
    """Draw one sign per share, by the square root of its ratio to the largest; a blank for zero."""
    top, steps = max(shares, default=0.0) or 1.0, len(BAR_CHARS)
    return "".join(BAR_CHARS[min(steps - 1, int(math.sqrt(x / top) * steps))] if x > 0 else " " for x in shares)


def _merged_lines(lines: Sequence[GroupTrace], sequence: SequenceReport) -> Iterator[tuple[str, str]]:
    """Yield (label, states); equal lines are merged, too many different ones are drawn by layer."""
    by_states: dict[str, list[GroupTrace]] = {}
    by_layer: dict[tuple[int, ...], list[str]] = {}
    for line in lines:
        by_states.setdefault(line.states, []).append(line)
        by_layer.setdefault(line.layers, []).append(line.states)
    if len(by_states) <= MAX_LINES:
        for states, equal in by_states.items():
            yield _labels(equal, sequence), states
        return
    for layers, all_states in by_layer.items():
        merged = "".join(_most_common_state("".join(column)) for column in zip(*all_states, strict=True))
        yield f"{format_indices('layer', layers)}, most of {len(all_states)} heads", merged


def _labels(lines: Sequence[GroupTrace], sequence: SequenceReport, separator: str = "; ") -> str:
    """Format ``layers 0-2; layer 3 heads 0, 2``."""
    layers: set[int] = set()
    heads: dict[int, list[int]] = {}
    for line in lines:
        if line.head is None:
            layers |= {*line.layers}
        else:
            heads.setdefault(line.layers[0], []).append(line.head)
    complete = {layer for layer, some in heads.items() if len(some) == len(sequence.attention_mass[layer])}
    labels = [format_indices("layer", layers | complete)] if layers | complete else []
    labels += [f"layer {layer} {format_indices('head', heads[layer])}" for layer in heads if layer not in complete]
    return separator.join(labels)


def _most_common_state(states: str) -> str:
    """Return the most common state; of equally common ones the one that retains most."""
    return max(STATES.values(), key=states.count)


def _mass(sequence: SequenceReport, lines: Sequence[GroupTrace]) -> list[float]:
    """Sum attention over the layers and heads of these lines, by position."""
    heads = [
        mass
        for line in lines
        for layer in line.layers
        for head, mass in enumerate(sequence.attention_mass[layer])
        if line.head in (None, head)
    ]
    return [sum(column) for column in zip(*heads, strict=True)] if heads else [0.0] * len(sequence.tokens)


def _legend(sequence: SequenceReport, lines: Sequence[GroupTrace]) -> Iterator[str]:
    counts = trace_report.count_states(sequence, lines)
    total = sum(counts.values())
    if not total:
        return
    yield "  " + "   ".join(f"{STATES[state]} {state} {n / total:.1%}" for state, n in counts.items() if n)
    received = evicted = 0.0
    for line in lines:
        mass = _mass(sequence, [line])
        received += sum(mass)
        evicted += sum(x for x, sign in zip(mass, line.states, strict=True) if sign == STATES["evicted"])
    if evicted:
        yield f"  evicted tokens had received {evicted / received:.1%} of the attention"


def _top_evicted(sequence: SequenceReport, lines: Sequence[GroupTrace], most: int) -> Iterator[str]:
    evicted: list[tuple[float, trace_report.StateChange, GroupTrace]] = []
    for line in lines:
        mass = _mass(sequence, [line])
        for change in line.changes:
            if change.state == "evicted":
                received = mass[change.first : change.last + 1]
                evicted.append((sum(received) / len(received), change, line))
    evicted.sort(key=lambda item: -item[0])
    if len(evicted) > most > 0:
        yield f"  {len(evicted)} evictions; the {most} with the most attention (--trace-token I shows others)"
    for mean, change, line in evicted[:most]:
        last = f" to {change.last}" if change.last > change.first else ""
        token = f"token {change.first}{last} {sequence.pieces[change.first]!r}, {_labels([line], sequence, ', ')}"
        yield from _wrap(f"{token}, attention {mean:.3g}: {change.why.text}", "  ")


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent="      ")


def _blocks(sequence: SequenceReport, groups: Sequence[GroupReport], layers: set[int]) -> Iterator[str]:
    """Draw one bar per block of each group, in the order of its block table."""
    for number, group in enumerate(groups):
        blocks = [block for block in sequence.blocks if block.group == number]
        drawn = [place for place, layer in enumerate(group.layers) if layer in layers]
        if not blocks or not drawn:
            continue
        shares = [sum(block.share[place] for place in drawn) / len(drawn) for block in blocks]
        top = max(range(len(blocks)), key=shares.__getitem__)
        best, where = blocks[top], format_indices("layer", layers & {*group.layers})
        held = f"{format_count(len(blocks), 'block')} of {where}, {group.state}"
        yield f"  {held}: {bar_signs(shares)} {sum(shares):.1%} of the attention"
        tokens, users = format_count(best.tokens, "token"), format_count(best.rows, "sequence")
        tokens += f" of {best.first} to {best.last}"
        yield f"    most: block {best.block}, {shares[top]:.1%}, {tokens}, {users}{', published' * best.published}"


def _token_histories(sequence: SequenceReport, lines: Sequence[GroupTrace], tokens: Sequence[int]) -> Iterator[str]:
    for at in tokens:
        if at >= len(sequence.tokens):
            yield f"  token {at}: this sequence has {len(sequence.tokens)} tokens"
            continue
        mass = _mass(sequence, lines)[at]
        yield f"  token {at} {sequence.pieces[at]!r}, id {sequence.tokens[at]}, attention {mass:.4g}"
        histories: dict[str, list[GroupTrace]] = {}
        for line in lines:
            history = "; ".join(change.why.text for change in line.changes if change.first <= at <= change.last)
            histories.setdefault(history, []).append(line)
        for history, equal in histories.items():
            yield from _wrap(f"{_labels(equal, sequence)}: {history or 'not computed'}", "    ")


def trace_to_html(report: TraceReport) -> str:
    """Build the whole file."""
    return self_contained_page(
        Path(__file__).parent,
        "trace_html",
        title=f"{report.model}: {report.policy}",
        text=trace_to_text(report),
        data=trace_report.trace_to_json(report),
    )


class CacheTrace(TraceReport):
    """A trace that a notebook shows as its page."""

    def _repr_html_(self) -> str:
        return notebook_frame(trace_to_html(self), 900)
