"""A support bot over HTTP: it looks things up, and refunds what a person allows."""
