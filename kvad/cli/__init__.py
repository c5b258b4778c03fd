"""The command line: one file per family of commands.  It wires the floors below and decides nothing itself.

No module of this package imports torch when it is imported: the heavy imports stand inside the commands.
"""
