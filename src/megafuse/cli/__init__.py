"""The command line: argument parsing only, thin over the public names."""
