"""A model and its cache on several ranks: functions applied from outside to a model that knows nothing of it.

``links``: what ranks talk over; ``shard`` cuts a model; ``wire``: a step as bytes; ``ranks``: one memory of many, led
by the rank that has the ledger.  Which rank has what is ``kvad/cache/mesh.py``.
"""
