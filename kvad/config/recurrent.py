"""Configuration of mixers of tokens without attention, whose cache is a state. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

from kvad.config.serialization import Range

MAX_SIZE = 2**24  # far above any model
Size = Annotated[int, Range(1), Range(high=MAX_SIZE)]  # heads, experts, and dims of vectors
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "silu", "tanh"]


class StateSizes(NamedTuple):
    """Numbers that the cache stores of one layer."""

    inputs: int  # of a token, for the convolution
    others: int  # of a token, for the recurrence
    snapshot: int = 0  # of a block: the state behind its last token


class RecurrentMixer:
    """Base of mixers without attention: the next token reads a state of fixed size, not all earlier tokens.

    The constants are the values of ``AttentionConfig`` that apply to every mixer.
    """

    num_heads: ClassVar[int] = 1
    num_kv_heads: ClassVar[int] = 1
    position: ClassVar[None] = None
    causal: ClassVar[bool] = True
    window: ClassVar[None] = None
    qk_norm: ClassVar[Literal["none"]] = "none"
    logit_softcap: ClassVar[None] = None
    sink_logits: ClassVar[bool] = False
    softmax_scale: ClassVar[Literal["none"]] = "none"
    latent: ClassVar[None] = None
    query_scaling: ClassVar[None] = None
    values_from_keys: ClassVar[bool] = False
    custom_class: ClassVar[None] = None
    output_gate: ClassVar[bool] = False
    kernel_size: int

    def state_sizes(self, hidden_size: int) -> StateSizes:
        """Return what the cache stores; each mixer defines it."""
        raise NotImplementedError

    def problem(self) -> str:
        """Return which field contradicts another one, and how; empty if none does."""
        return ""


@dataclass(frozen=True)
class ShortConvConfig(RecurrentMixer):
    """Gated short convolution (LFM2, Liquid AI 2025): ``out(c * conv(b * x))`` with ``b, c, x = input(h)``.

    The convolution is causal, with one kernel per channel. The cache stores the input of the last tokens.
    """

    kernel_size: Size = 3  # tokens that an output depends on, its own included
    bias: bool = False  # of the two matrices and of the convolution
    kind: Literal["short_conv"] = "short_conv"

    def state_sizes(self, hidden_size: int) -> StateSizes:
        return StateSizes(hidden_size, 0)


@dataclass(frozen=True)
class GatedRecurrenceConfig(RecurrentMixer):
    """Recurrent block of Griffin (De et al. 2024, sec. 2.3 and 2.4): ``out(act(gate(h)) * lru(conv(input(h))))``.

    The RG-LRU has a state of ``width`` numbers: ``s = a s_before + sqrt(1 - a^2) (i * x)`` with
    ``a = exp(-8 softplus(decay) r)``. Its gates i and r are sigmoids of ``num_blocks`` square matrices, each for its
    share of x. The cache stores the convolution's inputs and the states of the last tokens.
    """

    width: Size
    num_blocks: Size  # of both gates' matrices
    kernel_size: Size = 4  # of the convolution, which has a bias, like the other matrices
    activation: Activation = "gelu_tanh"
    kind: Literal["gated_recurrence"] = "gated_recurrence"

    def state_sizes(self, hidden_size: int) -> StateSizes:
        return StateSizes(self.width, self.width)

    def problem(self) -> str:
        if self.width % self.num_blocks == 0:
            return ""
        return f"num_blocks: must divide width {self.width}, got {self.num_blocks}"


@dataclass(frozen=True)
class GatedDeltaConfig(RecurrentMixer):
    """Gated DeltaNet (Yang et al. 2025, Qwen3-Next): linear attention whose state is a matrix per value head.

    Queries, keys and values pass a causal convolution and ``activation``; q and k are scaled to length one, q also by
    1/sqrt(key_dim). With ``a = exp(-exp(log_rate) softplus(decay(h) + decay_bias))`` and ``b = sigmoid(beta(h))``,
    ``S = a S_before + b k (v - a S_before^T k)^T``; a head's output is ``norm(S^T q) * silu(gate(h))``. Each key head
    serves equally many value heads. The cache stores the inputs of the last tokens, and S at the end of each block.
    """

    num_key_heads: Size
    num_value_heads: Size
    key_dim: Size  # numbers of a head's query and key
    value_dim: Size
    kernel_size: Size = 4  # of the convolution, without a bias
    activation: Activation = "silu"
    norm_eps: float = 1e-6  # of the norm of each head's output
    kind: Literal["gated_delta"] = "gated_delta"

    @property
    def keys_size(self) -> int:
        """Numbers of all queries of a token, and of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        """Numbers of all values of a token."""
        return self.num_value_heads * self.value_dim

    def state_sizes(self, hidden_size: int) -> StateSizes:
        inputs = 2 * self.keys_size + self.values_size
        others = self.keys_size + self.values_size + 2 * self.num_value_heads
        return StateSizes(inputs, others, self.num_value_heads * self.key_dim * self.value_dim)

    def problem(self) -> str:
        if self.num_value_heads % self.num_key_heads:
            return f"num_key_heads: must divide num_value_heads {self.num_value_heads}, got {self.num_key_heads}"
        return "" if self.kernel_size > 1 else "kernel_size: must be at least 2, got 1"
