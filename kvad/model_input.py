"""The contract between the host, the model and the memory: types only, no behaviour but the mask's definition.

Letters, everywhere in kvad:

==  =====================================  ==  ==========================================
B   rows (live sequences)                  N   positions whose logits are wanted
R   rows of one lane                       P   blocks that a row may read
L   new tokens of each row of a lane       H   query heads
T   new tokens in the step (all lanes)     K   key-value heads
S   slots that a row may read              D   head dim (``Dv`` where values differ)
V   vocabulary                             E   model width
==  =====================================  ==  ==========================================

Tokens travel flat: ``[T]``, ``[T, E]``, ``[T, H, D]``.  A step's lanes cut the flat tokens into rectangles, so
``x[start : start + rows * new].view(rows, new, ...)`` is a view and there is no padding to get wrong.

    lanes = (Lane(rows=2, new=1, read=48), Lane(rows=1, new=5, read=16))      # T = 2 + 5 = 7
    flat  =  a  b | c0 c1 c2 c3 c4                                            # two rows decode, one prefills

torch is imported for type checkers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

NULL_BLOCK = 0  # pads tables; never written, so its positions stay -1 and nothing in it is visible
PADDING_BLOCK = 1  # takes the writes of padding tokens; stands in no table
RESERVED_BLOCKS = 2


class SubBatch(NamedTuple):
    """A rectangle of the step: ``rows`` rows of ``new`` tokens each, that read ``read`` slots each."""

    num_seqs: int
    num_new_tokens: int
    num_read_slots: int


class TokenPositions(NamedTuple):
    """What decides visibility: ``position`` (int64, -1 = nothing there) and, in packed training, ``document``.

    ``order``: the place in the row, where positions restart and documents see those before them; -1 = never seen.
    """

    position: Tensor
    document_id: Tensor | None = None
    causal_order: Tensor | None = None

    @property
    def causal_index(self) -> Tensor:
        """What says who comes before whom: by (document, position), where a row's documents stand one after another."""
        return self.position if self.causal_order is None else self.causal_order


class SlotMapping(NamedTuple):
    """Where one cache group keeps a step's tokens.

    ``slots`` [T] int64: the slot (block * block_size + offset) that each new token is written to; None: read only.
    ``tables``: one per lane, [rows, P] int64, the blocks that each row may read, padded with :data:`EMPTY_BLOCK`.
    ``lanes``: how this group cuts the step's tokens, where it is another way than the step's: a lane of cross-attention
    takes rows that share a source as one row of ``rows of it * new`` tokens, so that k and v are read once per source.
    """

    slots: Tensor | None
    block_tables: tuple[Tensor, ...]
    sub_batches: tuple[SubBatch, ...] | None = None


class ModelInput(NamedTuple):
    """All inputs of one forward pass: plain tensors, and the lanes as Python integers.

    ``tokens`` [T] int64; ``positions`` [T] int64; ``documents`` [T] int64 in packed training, else None;
    ``wanted`` [N] int64, indices in T whose logits are wanted; ``limits`` [T] int64, the length that each token's row
    may reach, fixed at admission (it decides the rotary regime of dynamic and longrope scaling; None = the model's
    own limit); ``places``: one per cache group, ``()`` for Fresh.

    ``segments`` [T] int64: rows of the segment table, where an encoder has one (None: row 0 for all).

    ``order`` [T] int64: who comes before whom, where ``positions`` do not say it: packed documents whose positions
    restart and that are not isolated.  Encodings read positions, masks read this (:class:`Mark`).

    ``source``: an encoder's tokens, encoded whole before the decoder's.  In Fresh its lanes stand beside the decoder's,
    one for one, and row r of a lane attends to the source row ``r // (rows / source rows)``.  In a cache a source is
    written in a step without decoder tokens, and its ``places`` are those of the cross-attention groups.
    """

    token_ids: Tensor
    positions: Tensor
    sub_batches: tuple[SubBatch, ...]
    logit_indices: Tensor
    document_ids: Tensor | None = None
    max_seq_lens: Tensor | None = None
    slot_mappings: tuple[SlotMapping, ...] = ()
    encoder_input: ModelInput | None = None
    token_type_ids: Tensor | None = None
    causal_order: Tensor | None = None


class AttentionSpecLike(Protocol):
    """What says who an attention layer's queries may see (``config.MixerSpec``)."""

    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> int | None: ...
    @property
    def num_sinks(self) -> int: ...
    @property
    def window_step(self) -> int: ...
    @property
    def layer_window(self) -> int | None: ...
    @property
    def renumber_positions(self) -> bool: ...


@dataclass(frozen=True)
class AttentionPattern:
    """Who may see whom: the one definition of truth for masks.

    ``causal``: a query sees keys at its own position and before.  ``window`` counts visible keys, oneself included:
    causal ``0 <= q - k < window``, bidirectional ``|q - k| < window``.  A key at position < 0 is never visible, and
    tokens of different documents never see each other.  Where marks have an ``order``, it stands for "position" here.

    What a policy lets go is a rule of the same kind, so every query of a chunk sees what it would see alone.
    ``sinks``: the first so many positions stay visible beside the window (Xiao et al. 2023, StreamingLLM).  ``grain``:
    the window begins at a multiple of it, so that whole blocks leave at once.  ``renumber``: distances are those of a
    row whose kept tokens are numbered without a gap: a sink is at most ``sinks + window - 1`` away.  ``outer``: the
    layer's own window, where a policy's is narrower.

        window 4, sinks 2, q = 9:  sees 0 1 | 6 7 8 9;  renumbered, q is 5, and its keys are 0 1 2 3 4 5
    """

    causal: bool = True
    window: int | None = None
    num_sinks: int = 0
    window_step: int = 1
    layer_window: int | None = None
    renumber_positions: bool = False

    @staticmethod
    def from_spec(mixer: AttentionSpecLike) -> AttentionPattern:
        return AttentionPattern(
            mixer.causal, mixer.window, mixer.num_sinks, mixer.window_step, mixer.layer_window, mixer.renumber_positions
        )

    @property
    def renumbers_sinks(self) -> bool:
        """Whether a sink's distance is another than the difference of positions."""
        return self.renumber_positions and self.num_sinks > 0 and self.window is not None

    def first_visible(self, query: int) -> int:
        """The first position behind the sinks that a query at ``query`` may see."""
        if self.window is None:
            return 0
        first = max(0, query - self.window + 1)
        return -(-first // self.window_step) * self.window_step

    def renumbered_query(self, query: Tensor) -> Tensor:
        """What a query's position counts as, seen from a sink."""
        assert self.window is not None
        return query.clamp(max=self.num_sinks + self.window - 1)

    def visible(self, q: TokenPositions, k: TokenPositions) -> Tensor:
        """Visibility [..., L, S] of keys ``k`` ([..., S]) to queries ``q`` ([..., L])."""
        queries, keys = q.causal_index, k.causal_index
        ahead = queries.unsqueeze(-1) - keys.unsqueeze(-2)
        seen = (keys >= 0).unsqueeze(-2)
        if self.causal:
            seen = seen & (ahead >= 0)
            if self.window is not None:
                seen = seen & self._recent(queries, keys, ahead)
            if self.layer_window is not None:
                seen = seen & (self.distance(queries, keys) < self.layer_window)
        elif self.window is not None:
            seen = seen & (ahead.abs() < self.window)
        else:
            seen = seen.expand(ahead.shape)
        if q.document_id is not None and k.document_id is not None:
            seen = seen & (q.document_id.unsqueeze(-1) == k.document_id.unsqueeze(-2))
        return seen

    def _recent(self, queries: Tensor, keys: Tensor, ahead: Tensor) -> Tensor:
        assert self.window is not None
        if self.window_step == 1:
            recent = ahead < self.window
        else:
            first = (queries - self.window + 1).clamp(min=0)
            first = (first + self.window_step - 1) // self.window_step * self.window_step
            recent = keys.unsqueeze(-2) >= first.unsqueeze(-1)
        return recent | (keys < self.num_sinks).unsqueeze(-2) if self.num_sinks else recent

    def distance(self, q: Tensor, k: Tensor) -> Tensor:
        """q - k [..., L, S] as a position encoding is to see it, of positions q [..., L] and k [..., S]."""
        behind = q.unsqueeze(-1) - k.unsqueeze(-2)
        if not self.renumbers_sinks:
            return behind
        far = self.renumbered_query(q).unsqueeze(-1) - k.unsqueeze(-2)
        return far.where((k < self.num_sinks).unsqueeze(-2), behind)


class Rotary(NamedTuple):
    """RoPE as data (Su et al. 2021, sec. 3.2.2): pair i of a head turns by ``position * inv_freq[i]`` radians.

    ``inv_freq`` [D_rot/2], or [T, D_rot/2] where the regime depends on the row; the first ``D_rot`` dimensions turn.
    ``interleaved``: pairs are (0,1), (2,3), ... (GPT-J) instead of (0, D_rot/2), (1, D_rot/2 + 1), ... (GPT-NeoX).
    ``factor`` multiplies cos and sin (YaRN, longrope).
    """

    inv_freq: Tensor
    interleaved: bool
    factor: float


class AlibiSlopes(NamedTuple):
    """ALiBi (Press et al. 2021, sec. 3): the logit gets ``-factor * slopes[h] * |q - k|``. ``slopes`` [H].

    ``rounded``: the product of slope and k is a bfloat16 number, as Falcon has it: beyond position 256 neighbours share
    one.  What a query adds to all of its logits alike counts for nothing.
    """

    slopes: Tensor
    factor: float = 1.0
    round_to_bfloat16: bool = False


class RelativeBuckets(NamedTuple):
    """T5 relative bias (Raffel et al. 2020, sec. 2.1): ``table`` [num_buckets, H] indexed by the bucket of k - q."""

    table: Tensor
    max_distance: int
    bidirectional: bool


class PositionBias(Protocol):
    """What a position encoding of one's own adds to the logits: data, with one function of positions."""

    def compute(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [R, L] and [R, S] -> [R, H, L, S]."""
        ...


class AttentionParams(NamedTuple):
    """How q.k becomes a logit, as data: ``softcap(scale * rotate(q).rotate(k)) + bias``; ``sink_logits`` [H] join the
    softmax's denominator only (a head may attend to nothing).  ``dropout``: the share of the softmax's weights that
    training sets to zero; 0 wherever a cache reads."""

    scale: float
    logit_softcap: float | None = None
    rotary: Rotary | None = None
    bias: AlibiSlopes | RelativeBuckets | PositionBias | None = None
    sink_logits: Tensor | None = None
    dropout: float = 0.0


class CacheView(Protocol):
    """What one attention layer sees of a memory."""

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        """q [T, H, D], k [T, K, D], v [T, K, Dv] -> [T, H, Dv].  Rotates, writes, reads, attends.

        k = v = None: reads what :meth:`write` wrote (cross-attention).
        """
        ...

    def write(self, k: Tensor, v: Tensor) -> None:
        """k [T, K, D], v [T, K, Dv] of the step's source: once per source, for every step that reads it."""
        ...


class EvictOp(NamedTuple):
    """A row of ``length`` tokens keeps ``kept`` of the ``held`` slots in ``blocks``: which of them, the policy ranks on
    the device, head by head.  They fill ``targets`` from the front, in their order.  ``row`` is its seat."""

    seq_index: int
    length: int
    blocks: tuple[int, ...]
    num_held: int
    num_retained: int
    target_blocks: tuple[int, ...]


class MergeOp(NamedTuple):
    """The tokens of block ``source`` become few slots of block ``target``, from ``slot`` on.  Slots before it are those
    of block ``base`` (the target itself, but for copy-on-write); those behind are empty."""

    source_block: int
    target_block: int
    first_slot: int
    base_block: int


class BlockOps(NamedTuple):
    """Edits of bytes between two steps; plain integers from the ledger.  Applied in this order, which lets a block that
    one move has read be another's in the same step:

    ``store``: (number, per group a block or none): copied out to the host, for the tiers, which know the number.
    ``park``: (key, per group the blocks of a row): copied out to the host, and kept under the key.
    ``wake``: (key, per group as many blocks): what was parked comes back, whole.
    ``drop``: keys of parked rows that will not come back.
    ``load``: (number, per group a block or none): what the tiers lend under the number comes in, whole.
    ``compact``: per group, :class:`Compact`: a policy's cut of one row.
    ``pack``: per group, (source block, target block): whole blocks of the group above, in the group's own formats.
    ``fold``: per group, :class:`Fold`: blocks of the group above, summarised.
    ``clear``: per group, blocks that change hands: their positions become -1 and their contents zero.
    ``copy``: per group, (source block, target block, slots kept): copy-on-write; the target's other slots are empty.
    """

    clear: tuple[tuple[int, ...], ...]
    copy: tuple[tuple[tuple[int, int, int], ...], ...]
    evict: tuple[tuple[EvictOp, ...], ...] = ()
    swap_out: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()
    swap_in: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()
    drop_swapped: tuple[int, ...] = ()
    quantize: tuple[tuple[tuple[int, int], ...], ...] = ()
    merge: tuple[tuple[MergeOp, ...], ...] = ()
    store: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()
    load: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()


class CacheProtocol(Protocol):
    """Fresh (forgets) or a cache: the model does not know which."""

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        """One view per decoder layer, then one per cross-attention, for this step only."""
        ...
