"""Tests of the built wheel, run by `make wheel` with src out of reach."""
