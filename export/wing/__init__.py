"""Rarer forms, each whole in a file: its rewrites, operators, lowerings and decompositions.

Importing this registers them all, in ``export.rewrites`` and ``export.lowering.registry``.
Nothing of the exporter's core imports any of them, or knows which there are.
"""

import importlib
import pkgutil

for _each in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_each.name}")
