"""The one error type of the exporter."""

from __future__ import annotations


class ExportError(Exception):
    """A model, loss or optimizer cannot become a graph that is known to be right.

    The message names the operator, the module's path in the user's model (where there is one), the
    line of the user's code and what to use instead.
    """

    def __init__(
        self, what: str, *, operator: str = "", module: str = "", line: str = "", instead: str = ""
    ) -> None:
        self.what = what
        self.operator = operator
        self.module = module
        self.line = line
        self.instead = instead
        parts = [what]
        if operator:
            parts.append(f"operator: {operator}")
        if module:
            parts.append(f"in module: {module}")
        if line:
            parts.append(f"at {line}")
        if instead:
            parts.append(f"instead: {instead}")
        super().__init__("; ".join(parts))

    def at(self, module: str, line: str = "", *, operator: str = "") -> ExportError:
        """The same, said of a module, a line of code and an operator where none was named."""
        return type(self)(
            self.what,
            operator=self.operator or operator,
            module=self.module or module,
            line=self.line or line,
            instead=self.instead,
        )


class SettingError(ExportError, ValueError):
    """A setting of an optimizer or a schedule that is refused where it is given."""
