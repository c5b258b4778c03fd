"""The engine: requests in, tokens out, many rows at once over one cache."""
