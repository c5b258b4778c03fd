"""The Transformer and the memory that forgets.  Never imports ``kvad.cache``: they meet in ``kvad.step``."""
