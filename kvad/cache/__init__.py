"""The KV cache and its two faces, which meet in one small value, the :class:`~kvad.step.Step`.

The host face thinks in integers and imports no torch, so that it can be simulated: ``sizing`` (how many bytes),
``blocks`` (who owns which block), ``ledger`` (which blocks a row may read and write).  The device face (``memory``,
``layout``) holds tensors and decides nothing.
"""
