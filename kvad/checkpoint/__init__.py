"""Model folders on disk: safetensors and JSON, written so that what was there before stays whole.

``kvad.checkpoint.atomic`` replaces folders, ``kvad.checkpoint.native`` knows what is in kvad's own ones.
"""
