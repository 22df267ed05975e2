"""In a checkout: makes the folder cli/ beside this package ``lipcert.cli``. A wheel holds that folder instead."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "cli"
_SPEC = spec_from_file_location(__name__, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)])
assert _SPEC is not None
assert _SPEC.loader is not None
sys.modules[__name__] = module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules[__name__])
