"""Runnable examples; each works offline."""
