"""A fault that a check has found."""

from dataclasses import asdict, dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        check: the check's name, such as ``duplicate``.
        where: the tensor or module.
        found: what is there.
        expected: what should be there.
    """

    check: str
    where: str
    found: str
    expected: str

    def as_dict(self) -> dict[str, str]:
        """The four fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: found {self.found}; expected {self.expected}"
