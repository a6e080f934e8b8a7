"""python -m client.report FOLDER: draw the page of a comparison."""

import sys

from .page import main

if __name__ == "__main__":
    sys.exit(main())
