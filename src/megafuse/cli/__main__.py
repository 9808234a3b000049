"""``python -m megafuse.cli``: the command line where the package is not installed."""

from megafuse.cli.main import main

if __name__ == "__main__":
    main()
