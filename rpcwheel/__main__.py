"""`python -m rpcwheel`: the command line (`rpcwheel.cli`)."""

import sys

from rpcwheel.cli import main

if __name__ == "__main__":
    sys.exit(main())
