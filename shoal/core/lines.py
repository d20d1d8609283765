"""Text files that others write, read as they grow."""

from pathlib import Path


class LineReader:
    """Reads a growing file: each call of `poll` returns the whole lines that were written since the last."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def skip(self, *, all_but_bytes: int = 0) -> bool:
        """Leave out what is there already, but for the last `all_but_bytes`; return whether that leaves anything out.

        The first line after that may be the rest of one.
        """
        size_bytes = self._path.stat().st_size if self._path.is_file() else 0
        self._offset = max(0, size_bytes - all_but_bytes)
        return self._offset > 0

    def poll(self) -> list[bytes]:
        """Return the new whole lines; one still being written is left for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()
