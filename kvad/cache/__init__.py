"""CacheConfig, policies, cache groups and quantization formats.

The host side (``manager``, ``sizing``) works on integers and imports no torch, so it can be simulated. The device side
(``device``) holds tensors and decides nothing. They meet in ``kvad.model_input.ModelInput``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.cache import config as config
    from kvad.cache import groups as groups
    from kvad.cache import policy as policy
    from kvad.cache import policy_parser as policy_parser
    from kvad.cache import quantization as quantization
    from kvad.cache.config import CacheConfig as CacheConfig
    from kvad.cache.config import resolve_for_model as resolve_for_model
    from kvad.cache.groups import CacheGroup as CacheGroup
    from kvad.cache.groups import build_groups as build_groups
    from kvad.cache.groups import group_bytes as group_bytes
    from kvad.cache.policy import CachePolicy as CachePolicy
    from kvad.cache.policy_parser import parse_policy as parse_policy

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
