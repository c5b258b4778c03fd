"""The workbench: what a model would take (``plan``), what it holds (``inspect``), and whether its cache tells the truth.

Floor 7: it may look at everything below, and nothing but the command line looks at it.
"""
