"""``python -m lipcert`` is the command ``lipcert``."""

import os
import sys

if sys.path[0] != os.path.dirname(os.path.dirname(__file__)):  # files in the working folder replace no modules
    sys.path.append(sys.path.pop(0))

from lipcert.cli import main

main()
