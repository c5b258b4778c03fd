"""The workbench: what a model takes (``plan``) and holds (``inspect``), and whether its cache tells the truth.

Floor 7: it may look at everything below, and nothing but the command line looks at it.
"""
