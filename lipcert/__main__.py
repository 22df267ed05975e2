"""``python -m lipcert`` is the command ``lipcert``."""

import os
import sys

if sys.path[0] != os.path.dirname(os.path.dirname(__file__)):  # as without -m, files here replace no module of Python
    sys.path.append(sys.path.pop(0))

from lipcert.cli import main

main()
