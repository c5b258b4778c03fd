"""A slide of the cache microscope as text: a map of signs, one per token, that needs no colour and no terminal.

Layers and heads that keep the same are drawn once.  Nothing is cut off in silence: where there are more tokens than
columns, neighbours share a cell, which says how most of them are; what is not told is counted.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from kvad.errors import format_count
from kvad.inspection.trace_report import (
    STATES,
    GroupReport,
    GroupTrace,
    SequenceReport,
    StateChange,
    TraceReport,
    count_states,
)

BAR_CHARS = "▁▂▃▄▅▆▇█"
MAX_LINES = 64  # of one row in a text: beyond, heads are drawn together


def trace_to_text(
    slide: TraceReport,
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
    parts = [f"{slide.model}: {slide.policy}, {slide.layout}, {format_count(len(slide.steps), 'step')}"]
    parts += [f"  {line}" for line in _groups(slide)]
    parts += ["  at the end", *(f"    {place.text}" for place in slide.storage)] if slide.storage else []
    for number, row in enumerate(slide.rows):
        chosen = [line for line in row.lines if _is_selected(line, layers, heads)]
        parts += ["", *_heading(number, row), *_map(row, chosen, width), *_tally(row, chosen)]
        parts += _blocks(row, slide.groups, [layer for line in chosen for layer in line.layers])
        parts += [f"  step {each.step}: {each.text}" for each in row.events]
        parts += _token_histories(row, chosen, tokens) if tokens else _top_evicted(row, chosen, most)
    return "\n".join(line.rstrip() for line in parts)


def _is_selected(line: GroupTrace, layers: Sequence[int] | None, heads: Sequence[int] | None) -> bool:
    return (layers is None or bool({*layers} & {*line.layers})) and (
        heads is None or line.head is None or line.head in heads
    )


def _groups(slide: TraceReport) -> Iterator[str]:
    for group in slide.groups:
        last = max((step.used[slide.groups.index(group)] for step in slide.steps), default=0)
        what = {"hot": group.policy, "summarized": "summaries"}.get(group.state, group.state)
        yield (
            f"{format_indices('layer', group.layers)}: {what}, {group.stored}, blocks of {group.block_size}, "
            f"{last} of {group.blocks} used at the peak"
        )


def format_indices(name: str, values: Iterable[int]) -> str:
    """Format ``layer 3`` or ``layers 0-3, 5``."""
    ordered, spans = sorted(values), list[list[int]]()
    for value in ordered:
        if spans and spans[-1][1] + 1 == value:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"{name}{'s' if len(ordered) > 1 else ''} {text}"


def _heading(number: int, row: SequenceReport) -> Iterator[str]:
    sample = f", sample {row.sample}" if row.sample else ""
    claimed = f", {row.num_prefix_hits} of them found in the prefix cache" if row.num_prefix_hits else ""
    claimed += f", {row.restored} of them restored" if row.restored else ""
    ended = f", ended by {row.finish}" if row.finish else ""
    yield (
        f"row {number}{sample}: {format_count(row.prompt, 'token')} of prompt{claimed}, "
        f"{len(row.tokens) - row.prompt} generated{ended}"
    )
    if row.error:
        yield f"  {row.error}"


def _map(row: SequenceReport, lines: Sequence[GroupTrace], width: int) -> Iterator[str]:
    """Draw one line per different state sequence.

    A cell has as many tokens as the width requires.
    """
    drawn = list(_together(lines, row))
    margin = max([len(label) for label, _ in drawn] + [len("attention")]) + 4
    length = len(row.tokens)
    per_cell = max(1, -(-length // max(8, width - margin)))
    cells = range(0, length, per_cell)
    if per_cell > 1:
        yield f"  a cell is {per_cell} tokens and shows how most of them are"
    ruler = ""
    for number, cell in enumerate(cells):
        if number % 10 == 0:
            ruler = ruler.ljust(number) + str(cell)
    yield " " * margin + ruler
    for label, states in drawn:
        yield f"  {label}".ljust(margin) + "".join(_most_common_state(states[at : at + per_cell]) for at in cells)
    total = _mass(row, lines)
    shares = [sum(total[at : at + per_cell]) for at in cells]
    yield "  attention".ljust(margin) + bar_signs(shares)


def bar_signs(shares: Sequence[float]) -> str:
    """Draw one sign per share, by the square root of its ratio to the largest; a blank for zero."""
    top, steps = max(shares, default=0.0) or 1.0, len(BAR_CHARS)
    return "".join(BAR_CHARS[min(steps - 1, int(math.sqrt(x / top) * steps))] if x > 0 else " " for x in shares)


def _together(lines: Sequence[GroupTrace], row: SequenceReport) -> Iterator[tuple[str, str]]:
    """Return (label, states).

    Equal lines are merged, too many different lines are drawn by layer.
    """
    same: dict[str, list[GroupTrace]] = {}
    for line in lines:
        same.setdefault(line.states, []).append(line)
    if len(same) <= MAX_LINES:
        for states, which in same.items():
            yield "; ".join(_labels(which, row)), states
        return
    by_layer: dict[tuple[int, ...], list[str]] = {}
    for line in lines:
        by_layer.setdefault(line.layers, []).append(line.states)
    for layers, every in by_layer.items():
        merged = "".join(_most_common_state("".join(column)) for column in zip(*every, strict=True))
        yield f"{format_indices('layer', layers)}, most of {len(every)} heads", merged


def _labels(lines: Sequence[GroupTrace], row: SequenceReport) -> Iterator[str]:
    """Format ``layers 0-2``, ``layer 3 heads 0, 2``."""
    whole: set[int] = set()
    heads: dict[int, list[int]] = {}
    for line in lines:
        if line.head is None:
            whole |= {*line.layers}
        else:
            heads.setdefault(line.layers[0], []).append(line.head)
    for layer, which in list(heads.items()):
        if len(which) == len(row.attention_mass[layer]):
            whole.add(layer)
            del heads[layer]
    if whole:
        yield format_indices("layer", whole)
    for layer, which in heads.items():
        yield f"layer {layer} {format_indices('head', which)}"


def _most_common_state(states: str) -> str:
    """Return the most common state; of equally common ones the one that retains most."""
    return max(STATES.values(), key=states.count)


def _mass(row: SequenceReport, lines: Sequence[GroupTrace]) -> list[float]:
    """Sum attention over the layers and heads of these lines, by position."""
    total = [0.0] * len(row.tokens)
    for line in lines:
        for layer in line.layers:
            for head, got in enumerate(row.attention_mass[layer]):
                if line.head in (None, head):
                    for at, x in enumerate(got):
                        total[at] += x
    return total


def _tally(row: SequenceReport, lines: Sequence[GroupTrace]) -> Iterator[str]:
    """Draw the legend, with counts, and the attention share of evicted tokens."""
    found, every = count_states(row, lines), sum(map(len, (line.states for line in lines)))
    total = sum(found.values())
    if not total:
        return
    assert every
    text = [f"{STATES[state]} {state} {number / total:.1%}" for state, number in found.items() if number]
    yield "  " + "   ".join(text)
    whole = gone = 0.0
    for line in lines:
        got = _mass(row, [line])
        whole += sum(got)
        gone += sum(x for x, sign in zip(got, line.states, strict=True) if sign == STATES["evicted"])
    if gone:
        yield f"  what was evicted had got {gone / whole:.1%} of the attention"


def _where(line: GroupTrace, row: SequenceReport) -> str:
    return ", ".join(_labels([line], row))


def _piece(row: SequenceReport, at: int) -> str:
    return repr(row.pieces[at])


def _top_evicted(row: SequenceReport, lines: Sequence[GroupTrace], most: int) -> Iterator[str]:
    """List the evicted tokens with most attention."""
    left: list[tuple[float, StateChange, GroupTrace]] = []
    for line in lines:
        got = _mass(row, [line])
        for change in line.changes:
            if change.state == "evicted":
                here = got[change.first : change.last + 1]
                left.append((sum(here) / len(here), change, line))
    left.sort(key=lambda each: -each[0])
    if len(left) > most > 0:
        yield f"  of {len(left)} that were evicted, the {most} with most attention (--trace-token I shows others)"
    for got_each, change, line in left[:most]:
        last = f" to {change.last}" if change.last > change.first else ""
        named = f"token {change.first}{last} {_piece(row, change.first)}, {_where(line, row)}"
        whole = f"{named}, attention {got_each:.3g}: {change.why.text}"
        yield from textwrap.wrap(whole, 100, initial_indent="  ", subsequent_indent="      ")


def _blocks(row: SequenceReport, groups: Sequence[GroupReport], chosen: Sequence[int]) -> Iterator[str]:
    """Draw one bar per block of each group, in the order of its block table."""
    for number, group in enumerate(groups):
        blocks = [block for block in row.blocks if block.group == number]
        if not blocks or not {*chosen} & {*group.layers}:
            continue
        which = [place for place, layer in enumerate(group.layers) if layer in chosen]
        shares = [sum(block.share[place] for place in which) / len(which) for block in blocks]
        top = max(range(len(blocks)), key=shares.__getitem__)
        best = blocks[top]
        known = ", published" if best.published else ""
        where = format_indices("layer", {*group.layers} & {*chosen})
        held = f"{format_count(len(blocks), 'block')} of {where}, {group.state}"
        yield f"  {held}: {bar_signs(shares)} {sum(shares):.1%} of the attention"
        yield (
            f"    most: block {best.block}, {shares[top]:.1%}, {format_count(best.tokens, 'token')} of {best.first} to "
            f"{best.last}, {format_count(best.rows, 'row')}{known}"
        )


def _token_histories(row: SequenceReport, lines: Sequence[GroupTrace], tokens: Sequence[int]) -> Iterator[str]:
    for at in tokens:
        if at >= len(row.tokens):
            yield f"  token {at}: this row has {len(row.tokens)} tokens"
            continue
        yield f"  token {at} {_piece(row, at)}, id {row.tokens[at]}, attention {_mass(row, lines)[at]:.4g}"
        histories: dict[tuple[str, ...], list[GroupTrace]] = {}
        for line in lines:
            story = tuple(change.why.text for change in line.changes if change.first <= at <= change.last)
            histories.setdefault(story, []).append(line)
        for story, which in histories.items():
            whole = f"{'; '.join(_labels(which, row))}: {'; '.join(story) or 'not computed'}"
            yield from textwrap.wrap(whole, 100, initial_indent="    ", subsequent_indent="      ")
