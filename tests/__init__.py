"""The test suite; it mirrors src/guardchart."""
