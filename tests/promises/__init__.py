"""One named test per promise; docs/promises.md is their index."""
