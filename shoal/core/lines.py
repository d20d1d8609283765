"""Text files that others write, read as they grow."""

from pathlib import Path


class LineReader:
    """Reads a growing file: each call of `poll` returns the whole lines that were written since the last."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def skip(self) -> None:
        """Leave out what is there already."""
        self._offset = self._path.stat().st_size if self._path.is_file() else 0

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
