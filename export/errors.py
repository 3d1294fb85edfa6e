"""The one error type of the exporter."""

from __future__ import annotations


class ExportError(Exception):
    """A model, loss or optimizer cannot become a graph that is known to be right.

    The message names the operator, the module's path in the user's model (where there is one) and
    what to use instead.
    """

    def __init__(
        self, what: str, *, operator: str = "", module: str = "", instead: str = ""
    ) -> None:
        self.what = what
        self.operator = operator
        self.module = module
        self.instead = instead
        parts = [what]
        if operator:
            parts.append(f"operator: {operator}")
        if module:
            parts.append(f"in module: {module}")
        if instead:
            parts.append(f"instead: {instead}")
        super().__init__("; ".join(parts))

    def at(self, module: str, *, operator: str = "") -> ExportError:
        """The same, said of a module, and of an operator where none was named."""
        operator = self.operator or operator
        return ExportError(self.what, operator=operator, module=module, instead=self.instead)


class SettingError(ExportError, ValueError):
    """A setting of an optimizer or a schedule that is refused where it is given."""
