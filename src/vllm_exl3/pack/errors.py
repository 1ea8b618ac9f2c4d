"""The errors and warnings that describe a pack, always in the same four parts."""

__all__ = ["Exl3PackError", "Exl3PackWarning"]


class Exl3PackError(Exception):
    """A pack that cannot be served as it is.

    Not a ValueError: pydantic, which validates vLLM's configuration, would bury the message in its own.

    Attributes:
        found: what the pack holds.
        expected: what it should hold.
        where: file, tensor or layer.
        remedy: what the reader can do about it.
    """

    def __init__(self, *, found: str, expected: str, where: str, remedy: str) -> None:
        self.found, self.expected, self.where, self.remedy = map(_printable, (found, expected, where, remedy))
        super().__init__(self.found, self.expected, self.where, self.remedy)

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}; expected {self.expected}. {self.remedy}"

    def parts(self) -> dict[str, str]:
        """The four parts by name, for JSON."""
        return {"found": self.found, "expected": self.expected, "where": self.where, "remedy": self.remedy}

    def report(self) -> str:
        """The four parts on a line each, for a terminal."""
        return f"Where:    {self.where}\nFound:    {self.found}\nExpected: {self.expected}\nWhat to do: {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross vLLM's process boundaries; keyword-only arguments need their own recipe.
        return (_rebuild, (self.found, self.expected, self.where, self.remedy))


def _printable(text: str) -> str:
    """The text with bytes of paths that are no UTF-8 as escapes: no terminal and no JSON takes them as they are."""
    return text.encode(errors="backslashreplace").decode()


def _rebuild(found: str, expected: str, where: str, remedy: str) -> Exl3PackError:
    return Exl3PackError(found=found, expected=expected, where=where, remedy=remedy)


class Exl3PackWarning(UserWarning):
    """A harmless oddity of a pack: what its headers say wins over what its metadata claims."""
