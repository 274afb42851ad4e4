"""Typed configuration of a run, checked before anything compiles."""

from rlstable.config.run import Config as Config
from rlstable.config.run import load as load
from rlstable.config.schema import ConfigError as ConfigError
