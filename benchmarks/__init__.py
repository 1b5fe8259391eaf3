"""Ratios against peers, each taken in one run; see the modules. No part of the tests."""
