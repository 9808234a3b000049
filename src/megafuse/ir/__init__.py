"""The graph language: a few ops, immutable nodes, printer, verifier, rewrite rules and an interpreter."""
