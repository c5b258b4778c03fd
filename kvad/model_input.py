"""Types shared by the host, the model and the cache; the only behavior is the attention mask and passing calls on.

Shape letters, everywhere in kvad:

==  =====================================  ==  ==========================================
B   running sequences                      N   positions whose logits are computed
R   sequences of one sub-batch             P   blocks that a sequence may read
L   new tokens per sequence of it          H   query heads
T   new tokens of the step                 K   key-value heads
S   slots that a sequence may read         D   head dim (``Dv`` if values differ)
V   vocabulary                             E   hidden size
==  =====================================  ==  ==========================================

Tokens are flat: ``[T]``, ``[T, E]``, ``[T, H, D]``. Sub-batches divide them into rectangles, so
``x[start : start + num_seqs * num_new_tokens].view(num_seqs, num_new_tokens, ...)`` is a view, without padding.

    sub_batches = (SubBatch(2, 1, 48), SubBatch(1, 5, 16))      # T = 2 + 5 = 7
    flat        =  a  b | c0 c1 c2 c3 c4                        # two sequences decode, one prefills

torch is imported for type checkers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

NULL_BLOCK = 0  # pads block tables; never written, so its positions stay -1 and its slots are invisible
PADDING_BLOCK = 1  # takes the writes of padding tokens; in no block table
RESERVED_BLOCKS = 2
MAX_READ_SLOTS = 1 << 17  # slots that a sub-batch of several sequences may read: bounds what attention gathers


class SubBatch(NamedTuple):
    """Sequences of a step with equally many new tokens."""

    num_seqs: int
    num_new_tokens: int  # per sequence
    num_read_slots: int  # per sequence


class TokenPositions(NamedTuple):
    """Positions of tokens, which determine visibility."""

    position: Tensor  # int64; -1: empty slot
    document_id: Tensor | None = None  # int64, in packed training
    causal_order: Tensor | None = (
        None  # index in the row, if positions restart and documents are visible; -1: invisible
    )

    @property
    def causal_index(self) -> Tensor:
        """The index that causal masks compare: ``causal_order`` if given, else ``position``."""
        return self.position if self.causal_order is None else self.causal_order


class SlotMapping(NamedTuple):
    """Slots and block tables of one cache group in one step."""

    slots: Tensor | None  # [T] int64, block * block_size + offset of each new token; None: read only
    block_tables: tuple[Tensor, ...]  # per sub-batch [R, P] int64, padded with NULL_BLOCK
    # The group's own sub-batches, if they differ from the step's: in cross-attention, sequences that share an encoder
    # input are one sequence with all their new tokens, so k and v are read once per encoder input.
    sub_batches: tuple[SubBatch, ...] | None = None


class ModelInput(NamedTuple):
    """All inputs of one forward pass; tensors are int64."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    sub_batches: tuple[SubBatch, ...]
    logit_indices: Tensor  # [N] indices in T
    document_ids: Tensor | None = None  # [T] in packed training
    # [T] number of tokens of each token's sequence, later ones of its prompt included; it chooses the frequencies of
    # dynamic and longrope scaling. None: more than the original length.
    seq_lens: Tensor | None = None
    slot_mappings: tuple[SlotMapping, ...] = ()  # one per cache group; () for NoCache
    # The encoder's tokens, encoded whole before the decoder's. With NoCache its sub-batches match the decoder's one by
    # one, and sequence r attends to the encoder's sequence r // (num_seqs / encoder's num_seqs). With a cache it is
    # written in a step without decoder tokens, and its slot_mappings are those of the cross-attention groups.
    encoder_input: ModelInput | None = None
    token_type_ids: Tensor | None = None  # [T] rows of an encoder's token type table; None: 0
    # [T] order of tokens if positions do not give it: packed documents whose positions restart and that are visible to
    # later ones. Position encodings use positions, masks use this.
    causal_order: Tensor | None = None
    adapters: TokenAdapters | None = None  # of the tokens; None: no token has one


class TokenAdapters(Protocol):
    """Low-rank terms that some tokens of a step add to the products of linear layers (``model/lora.py``)."""

    def add(self, layer: Module, x: Tensor, out: Tensor) -> Tensor:
        """Add the terms for ``layer``, given its input x [T, in], to ``out`` [T, out] in place.

        Tokens whose adapter has no term for the layer, and those without an adapter, are not touched.
        """
        ...


@dataclass(frozen=True)
class AttentionPattern:
    """Visibility of keys to queries: the only definition of masks.

    Causal: ``0 <= q - k < window``; bidirectional: ``|q - k| < window``. A key at a position < 0 is never visible, and
    tokens of different documents never see each other. If ``causal_order`` is given, it replaces positions here.

    Sinks and windows of cache policies are rules of the same kind, so each query of a chunk sees the same keys as in a
    step of its own.

        window 4, sinks 2, q = 9:  sees 0 1 | 6 7 8 9;  renumbered, q is 5, and its keys are 0 1 2 3 4 5
    """

    causal: bool = True
    window: int | None = None  # number of visible keys, the query's own included
    num_sinks: int = 0  # first positions that stay visible outside the window (Xiao et al. 2023, StreamingLLM)
    window_step: int = 1  # the window begins at a multiple of it, so that whole blocks are freed
    layer_window: int | None = None  # the layer's window, if a policy's is narrower
    renumber_positions: bool = False  # number retained tokens without gaps: a sink is at most sinks + window - 1 away

    @property
    def renumbers_sinks(self) -> bool:
        """True if the distance to a sink differs from the difference of positions."""
        return self.renumber_positions and self.num_sinks > 0 and self.window is not None

    def first_visible(self, query: int) -> int:
        """Return the first position after the sinks that a query at position ``query`` may see."""
        if self.window is None:
            return 0
        first = max(0, query - self.window + 1)
        return -(-first // self.window_step) * self.window_step

    def renumbered_query(self, query: Tensor) -> Tensor:
        """Return the queries' positions relative to the sinks."""
        assert self.window is not None
        return query.clamp(max=self.num_sinks + self.window - 1)

    def visible(self, q: TokenPositions, k: TokenPositions) -> Tensor:
        """Return the visibility [..., L, S] of keys ``k`` [..., S] to queries ``q`` [..., L]."""
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
        """Return q - k [..., L, S] for position encodings, from positions q [..., L] and k [..., S]."""
        difference = q.unsqueeze(-1) - k.unsqueeze(-2)
        if not self.renumbers_sinks:
            return difference
        to_sinks = self.renumbered_query(q).unsqueeze(-1) - k.unsqueeze(-2)
        return to_sinks.where((k < self.num_sinks).unsqueeze(-2), difference)


class Rotary(NamedTuple):
    """RoPE as data (Su et al. 2021, sec. 3.2.2): pair i of a head is rotated by ``position * inv_freq[i]`` radians."""

    inv_freq: Tensor  # [D_rot/2], or [T, D_rot/2] if it depends on the sequence; the first D_rot dims are rotated
    interleaved: bool  # pairs (0,1), (2,3), ... (GPT-J) instead of (0, D_rot/2), (1, D_rot/2 + 1), ... (GPT-NeoX)
    factor: float  # multiplies cos and sin (YaRN, longrope)


class AlibiSlopes(NamedTuple):
    """ALiBi (Press et al. 2021, sec. 3): adds ``-factor * slopes[h] * |q - k|`` to the logit."""

    slopes: Tensor  # [H]
    factor: float = 1.0
    # Round slope * k to bfloat16, as Falcon does: beyond position 256 neighbors share a value. A term that a query adds
    # to all its logits has no effect.
    round_to_bfloat16: bool = False


class RelativeBuckets(NamedTuple):
    """T5 relative bias (Raffel et al. 2020, sec. 2.1), indexed by the bucket of k - q."""

    table: Tensor  # [num_buckets, H]
    max_distance: int
    bidirectional: bool


class DisentangledBias(NamedTuple):
    """DeBERTa's bias (He et al. 2021, eq. 4): a query times a projected distance, plus a key times another."""

    query_rows: Tensor | None  # [2 span, H, D] distances projected as queries, multiplied by keys; None: no such term
    key_rows: Tensor | None  # [2 span, H, D] distances projected as keys, multiplied by queries
    span: int  # rows of one direction
    num_buckets: int | None
    max_distance: int


class PositionBias(Protocol):
    """Bias of a custom position encoding: data, with one function of positions."""

    def compute(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Compute the bias [R, H, L, S] from positions [R, L] and [R, S]."""
        ...


class AttentionParams(NamedTuple):
    """Parameters that turn q.k into a logit: ``softcap(scale * rotate(q).rotate(k)) + bias``."""

    scale: float
    logit_softcap: float | None = None
    rotary: Rotary | None = None
    bias: AlibiSlopes | RelativeBuckets | PositionBias | Tensor | None = None  # a tensor: [R, H, L, S] of a sub-batch
    sink_logits: Tensor | None = None  # [H], added to the softmax's denominator only
    dropout: float = 0.0  # rate of softmax weights set to zero in training; 0 with a cache
    disentangled: DisentangledBias | None = None  # of encoders: NoCache computes the bias of each sub-batch from it


class DeltaInputs(NamedTuple):
    """Inputs of the gated delta rule, in at least float32 (``config.GatedDeltaConfig``)."""

    q: Tensor  # [T, K, D], scaled
    k: Tensor  # [T, K, D], of length one
    v: Tensor  # [T, H, Dv]; each of the K key heads serves H / K consecutive value heads
    log_decay: Tensor  # [T, H], at most 0
    beta: Tensor  # [T, H], from 0 to 1


class CacheView(Protocol):
    """One layer's access to the cache in one step."""

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        """Rotate, write, read and attend: q [T, H, D], k [T, K, D], v [T, K, Dv] -> [T, H, Dv].

        With k = v = None, read what ``write`` wrote (cross-attention).
        """
        ...

    def write(self, k: Tensor, v: Tensor) -> None:
        """Write k [T, K, D], v [T, K, Dv] of the encoder's output, once for all steps that read it."""
        ...

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Convolve each sequence and channel causally: x [T, C], kernel [C, W], the oldest input first -> [T, C]."""
        ...

    def recur(self, x: Tensor, log_decay: Tensor) -> Tensor:
        """Apply a gated recurrence to each sequence and channel, after ``convolve``: x, log_decay [T, C] -> [T, C].

        ``h = a h_before + sqrt(1 - a^2) x`` with ``a = exp(log_decay)``; a sequence begins with ``h = x``.
        """
        ...

    def delta(self, inputs: DeltaInputs) -> Tensor:
        """Apply the gated delta rule to each sequence and head, after ``convolve`` -> [T, H, Dv]."""
        ...


class WrappedView:
    """Base of views that differ from another in ``attend``: passes every other call on to it."""

    def __init__(self, view: CacheView) -> None:
        self.view = view

    def write(self, k: Tensor, v: Tensor) -> None:
        self.view.write(k, v)

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        return self.view.convolve(x, kernel)

    def recur(self, x: Tensor, log_decay: Tensor) -> Tensor:
        return self.view.recur(x, log_decay)

    def delta(self, inputs: DeltaInputs) -> Tensor:
        return self.view.delta(inputs)


class EvictOp(NamedTuple):
    """Eviction of tokens of one sequence; the policy ranks them on the device, per head."""

    seq_index: int
    length: int  # tokens of the sequence
    blocks: tuple[int, ...]
    num_held: int  # slots in use before
    num_retained: int  # slots that stay
    target_blocks: tuple[int, ...]  # filled with the retained slots from the front, in their order


class MergeOp(NamedTuple):
    """Summarization of a block's tokens into a few slots of another block."""

    source_block: int
    target_block: int
    first_slot: int  # the first slot written; later slots of the target are empty
    base_block: int  # provides the slots before first_slot: the target itself, but for copy-on-write


class BlockOps(NamedTuple):
    """Edits of blocks between two steps, as integers from the KVCacheManager.

    They are applied in this order, so a block that one operation has read can be the target of a later one:

    ``store``: (number, per group a block or none): copied to the host for the block store.
    ``swap_out``: (key, per group the blocks of a sequence): copied to the host under the key.
    ``swap_in``: (key, per group as many blocks): copied back from the host.
    ``drop_swapped``: keys of swapped sequences that are discarded.
    ``load``: (number, per group a block or none): copied from the block store.
    ``evict``: per group, ``EvictOp``.
    ``quantize``: per group, (source block, target block): a block of the upper level, in this group's formats.
    ``merge``: per group, ``MergeOp``: a block of the upper level, summarized.
    ``clear``: per group, blocks with a new owner: positions become -1 and contents zero.
    ``copy``: per group, (source block, target block, slots copied): copy-on-write; the target's other slots are empty.
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

    @property
    def is_empty(self) -> bool:
        """True if nothing is edited, as in most decoding steps."""
        return not (any(self.clear) or any(self.copy) or any(self[2:]))


class CacheProtocol(Protocol):
    """The interface of KVCache and NoCache."""

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        """Return one view per decoder layer, then one per cross-attention, for this step only."""
        ...
