"""What can be wrong with a person's files, in words that name the file; and text as UTF-8, never guessed."""

from pathlib import Path
from typing import NamedTuple

MAX_CAPTION_BYTES = 1 << 20  # a caption file of more is no caption

# Kinds of faults; those of pictures are in unet_attn.images.
CAPTION, METADATA, FOLDER = "caption", "metadata", "folder"


class DataError(ValueError):
    """Data that cannot be trained on. The first line says what and where, further lines list the files."""


class Fault(NamedTuple):
    """A file that cannot be used, why, and in one or two words what kind of fault that is."""

    path: Path
    reason: str
    kind: str

    def __str__(self) -> str:
        return printable(f"{shown(self.path)}: {self.reason}")


def counted(number: int, one: str, several: str | None = None) -> str:
    """A number with the words that go with it: counted(1, "picture"), counted(2, "picture is", "pictures are")."""
    return f"{number} {one}" if number == 1 else f"{number} {several or one + 's'}"


def printable(text: str) -> str:
    """The text without what a terminal or a file cannot hold: odd bytes and control characters become escapes."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return "".join(
        character if character.isprintable() or character in "\n\t" else repr(character)[1:-1] for character in text
    )


def shown(path: Path) -> str:
    """The path as text that can be printed, whatever bytes a file system put into it."""
    return printable(str(path)).replace("\n", "\\n").replace("\t", "\\t")


def why(error: Exception) -> str:
    """The message of an error, without the path that OSError puts around it."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def one_line(text: str) -> str:
    """A caption without line breaks and doubled blanks."""
    return " ".join(text.split())


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, with or without a byte order mark, or two, of programs that each put one in front.

    Raises ValueError giving the byte offset if it is not UTF-8 (never guesses another encoding), OSError if unreadable.
    """
    data = path.read_bytes()
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError("is UTF-16, not UTF-8 (byte order mark at byte 0): save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # error.object lacks the mark that utf-8-sig cut off
        offset = error.start + len(data) - len(error.object)
        raise ValueError(f"is not UTF-8 at byte {offset} (0x{data[offset]:02x}): save it as UTF-8") from None
    if "\0" in text:
        offset = data.index(b"\0")
        raise ValueError(f"has a zero byte at byte {offset}, so it is not UTF-8 text (UTF-16?): save it as UTF-8")
    return text.lstrip("\ufeff")


def write_faults(faults: list[Fault], path: Path) -> None:
    """Write one line per fault: kind, path and reason, between tabs."""
    lines = [printable("\t".join((fault.kind, shown(fault.path), one_line(fault.reason)))) for fault in faults]
    path.write_text("\n".join(["kind\tpath\treason", *lines]) + "\n", encoding="utf-8")
