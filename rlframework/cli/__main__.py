"""Entry point of `python -m rlframework.cli`."""

from rlframework.cli.common import main

if __name__ == "__main__":
    main()
