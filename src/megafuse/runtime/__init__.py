"""Loads, binds, launches and times what code generation made. Imports core and the artifact file of codegen."""
