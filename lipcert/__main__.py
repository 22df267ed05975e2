"""``python -m lipcert`` is the command ``lipcert``."""

from lipcert.cli import main

main()
