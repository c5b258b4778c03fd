"""Pure tensor functions; the only place where a kernel is chosen."""
