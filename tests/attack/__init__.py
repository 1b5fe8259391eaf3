"""Attacks that once succeeded, each as the smallest test that showed it."""
