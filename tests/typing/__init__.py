"""Programs that are type checked and not run; see test_agents.py."""
