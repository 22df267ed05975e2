"""The settings of commands and library calls: fields with help texts and checks, without torch."""

from lipcert.settings._certify import (
    AUTO,
    DTYPES,
    RIGORS,
    CertifyOptions,
    CertifySettings,
    eps_text,
    noise_fields,
    parse_eps,
)
from lipcert.settings._constrain import ENGINES, MEASURE_NAMES, ConstrainSettings
from lipcert.settings._fields import COUNT, INSIDE, check, one_of, option, parse_memory, settings_of, shown, takes
from lipcert.settings._finetune import GLOBAL, LOSSES, SCHEDULES, FinetuneSettings, MaxNorm
from lipcert.settings._methods import (
    DETERMINISTIC,
    FACTS,
    LINEARISED,
    LOOSE,
    METHODS,
    NAMES,
    SINGLE,
    SMOOTHING,
    STAGED,
    MethodFacts,
    MethodName,
    add_method,
    unreached,
)
from lipcert.settings._recipes import RECIPES, recipe_settings
from lipcert.settings._version import version
