"""`accelerate.utils.transformer_engine`, with every name that this package has for Accelerate's."""

from notebook_launcher.compat.names import find as __getattr__  # noqa: F401 - answers `from ... import name`
