"""Balance of a mixture's experts in training: losses, selection biases, and loads.

Without any of them a router may collapse: experts that get few tokens learn little, and get fewer still. Of one layer,
over the T tokens of a micro-batch (padding is left out), with N experts of which each token chooses n:

*   ``objective.router_aux_loss_coef`` times N sum_i f_i P_i (Fedus et al. 2021, eq. 4-6), where f_i is expert i's share
    of the n T choices and P_i its mean probability (a sigmoid router's scores are divided by their sum). 1 if balanced.
*   ``objective.router_z_loss_coef`` times the mean of logsumexp(logits)^2 (Zoph et al. 2022, eq. 5), which keeps logits
    small.
*   ``objective.router_bias_update_rate`` u, without a loss (Wang et al. 2024; DeepSeek-V3 2024, sec. 2.1.2): after each
    optimizer step the selection bias of expert i becomes b_i + u sign(mean load - load_i), with the loads of all
    micro-batches and ranks.

The losses are summed over layers, and a micro-batch counts by its number of targets. The reported training loss does
not contain them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvad import config as cfg
from kvad import model as model_lib
from kvad.model import Transformer
from kvad.model_input import ModelInput
from kvad.train.config import ObjectiveConfig

MixtureOfExperts = model_lib.layers.MixtureOfExperts
Routing = model_lib.layers.Routing


class ExpertLoad(NamedTuple):
    """Choices of each expert of one layer in an optimizer step."""

    layer: str
    counts: tuple[int, ...]

    @property
    def max_ratio(self) -> float:
        """The largest load over the mean."""
        return max(self.counts) * len(self.counts) / max(sum(self.counts), 1)

    @property
    def num_starved(self) -> int:
        """Number of experts that got less than a tenth of the mean load."""
        return sum(10 * count * len(self.counts) < sum(self.counts) for count in self.counts)

    @property
    def num_busy(self) -> int:
        """Smallest number of experts that got 90% of the choices together."""
        busy, rest = 0, sum(self.counts)
        for count in sorted(self.counts, reverse=True):
            if 10 * rest <= sum(self.counts):
                break
            busy, rest = busy + 1, rest - count
        return busy


def load_balancing_loss(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Return N sum_i f_i P_i of probabilities [T, N] and chosen experts [T, n]."""
    num_experts = probabilities.shape[1]
    counts = torch.bincount(experts.flatten(), minlength=num_experts).to(probabilities.dtype)
    return num_experts * (counts / experts.numel() * probabilities.mean(dim=0)).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """Return the mean of logsumexp(logits)^2 of logits [T, N]."""
    return logits.logsumexp(dim=-1).square().mean()


class ExpertBalancer:
    """Balances and counts the experts of a model in training."""

    def __init__(self, model: Transformer, options: ObjectiveConfig) -> None:
        self._layers = {name: part for name, part in model.named_modules() if isinstance(part, MixtureOfExperts)}
        self._options = options
        self._counts = [torch.zeros(0)] * len(self._layers)
        self._clear()

    def _clear(self) -> None:
        for index, layer in enumerate(self._layers.values()):
            device = layer.router.weight.device
            self._counts[index] = torch.zeros(layer.spec.num_experts, dtype=torch.int64, device=device)

    def loss(self, routings: Sequence[Routing], model_input: ModelInput) -> Tensor:
        """Add the loads of a micro-batch, and return its weighted losses, summed over layers."""
        total = routings[0].logits.new_zeros(())
        for index, ((name, layer), routing) in enumerate(zip(self._layers.items(), routings, strict=True)):
            is_source = name.startswith("encoder.") and model_input.encoder_input is not None
            side = model_input.encoder_input if is_source else model_input
            assert side is not None
            logits, experts = routing
            if side.document_ids is not None:
                is_token = side.document_ids >= 0
                logits, experts = logits[is_token], experts[is_token]
            self._counts[index] += torch.bincount(experts.flatten(), minlength=layer.spec.num_experts)
            if len(logits):
                total = total + self._layer_loss(layer.spec, logits, experts)
        return total

    def _layer_loss(self, spec: cfg.MoEConfig, logits: Tensor, experts: Tensor) -> Tensor:
        options, loss = self._options, logits.new_zeros(())
        if options.router_aux_loss_coef:
            scores = logits.softmax(dim=-1) if spec.router == "softmax" else torch.sigmoid(logits)
            probabilities = scores / scores.sum(dim=-1, keepdim=True)
            loss = loss + options.router_aux_loss_coef * load_balancing_loss(probabilities, experts)
        if options.router_z_loss_coef:
            loss = loss + options.router_z_loss_coef * router_z_loss(logits)
        return loss

    @torch.no_grad()
    def end_step(self, sum_over_ranks: Callable[[Tensor], Tensor], *, is_updated: bool) -> tuple[ExpertLoad, ...]:
        """Update the selection biases after an optimizer step, and return its loads.

        Args:
            sum_over_ranks: Sums a tensor over the data-parallel ranks.
            is_updated: The optimizer changed the weights; if not, the biases are unchanged too.
        """
        sizes = [len(counts) for counts in self._counts]
        summed = sum_over_ranks(torch.cat(self._counts)).split(sizes)
        self._clear()
        loads = []
        for (name, layer), counts in zip(self._layers.items(), summed, strict=True):
            rate, biases = self._options.router_bias_update_rate, layer.selection_bias
            if rate and biases is not None and is_updated:
                wide = counts.to(torch.float64)
                biases.add_((wide.mean() - wide).sign().to(biases.device, biases.dtype), alpha=rate)
            loads.append(ExpertLoad(name, tuple(counts.tolist())))
        return tuple(loads)
