"""A report: named values in titled sections, for a person's terminal or for a program as JSON. Plain Python, shared
with the SDK.

    metrics = Metrics("Ping KV Cache")
    metrics.add("status", "Status", "OK")                              flat values come first
    metrics.add_section("results", "Results").add("duration", "Total Duration (s)", 1.5)
    metrics.add_handler(StreamHandler(get_formatter("terminal", width=60)))
    metrics.emit()

    ====================== Ping KV Cache =======================
    Status:                                                   OK
    ------------------------- Results --------------------------
    Total Duration (s):                                     1.50
    ============================================================

`to_dict` is for programs: `{"title": ..., "metrics": {flat values, sections, tables as rows, list groups last}}`,
values raw.
"""

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

__all__ = ["FileHandler", "Formatter", "Handler", "Metrics", "Section", "StreamHandler", "get_formatter"]

NARROWEST = 16
"""Characters to which the last column of a table is wrapped at least, however narrow the terminal."""


class Section:
    """Named values under one label; or, once it has columns, the rows of a table; or one element of a list `group`."""

    def __init__(self, key: str, label: str, group: str = "") -> None:
        self.key = key
        self.label = label
        self.group = group
        self.entries: list[tuple[str, str, Any]] = []
        self.columns: list[tuple[str, str]] = []
        self.rows: list[dict[str, Any]] = []

    def add(self, key: str, label: str, value: Any) -> None:
        """One value: `key` for programs, `label` for people."""
        self.entries.append((key, label, value))

    def set_columns(self, *columns: tuple[str, str]) -> None:
        """Make this a table: (key, header) of each column."""
        self.columns = list(columns)

    def add_row(self, **values: Any) -> None:
        """One row of the table; a column without a value stays empty. ValueError for a column that there is not."""
        if not self.columns:
            raise ValueError(f"section {self.key!r} is no table: call set_columns first")
        unknown = values.keys() - {key for key, _ in self.columns}
        if unknown:
            raise ValueError(f"table {self.key!r} has no column {min(unknown)!r}")
        self.rows.append(values)

    def to_value(self) -> Any:
        """The section for programs: a map, or the list of a table's rows."""
        if self.columns:
            return [{key: row.get(key) for key, _ in self.columns} for row in self.rows]
        return {key: value for key, _, value in self.entries}


class Formatter(Protocol):
    """Turns a report into text."""

    def format(self, title: str, sections: Sequence[Section]) -> str:
        """The text of the whole report."""


class Handler(Protocol):
    """Where a report goes when it is emitted."""

    def emit(self, title: str, sections: Sequence[Section]) -> None:
        """Put the report there."""


class Metrics:
    """A report that is filled, then emitted or read."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._flat = Section("", "")
        self._sections: dict[str, Section] = {}
        self._handlers: list[Handler] = []

    def __getitem__(self, key: str) -> Section:
        """The section `key`; KeyError if there is none."""
        return self._sections[key]

    def title(self, title: str) -> None:
        """Change the title."""
        self._title = title

    def add_handler(self, handler: Handler) -> None:
        """Emit to `handler` too."""
        self._handlers.append(handler)

    def add(self, key: str, label: str, value: Any) -> None:
        """One value outside of any section."""
        self._flat.add(key, label, value)

    def add_section(self, key: str, label: str) -> Section:
        """A new section; ValueError if the key is taken."""
        return self._new(key, Section(key, label))

    def add_list_section(self, group: str, key: str, label: str) -> Section:
        """A new section that is one element of the list `group`; ValueError if the key is taken."""
        return self._new(key, Section(key, label, group))

    def add_table(self, key: str, label: str, *columns: tuple[str, str]) -> Section:
        """A new table of (key, header) columns; ValueError if the key is taken."""
        section = self._new(key, Section(key, label))
        section.set_columns(*columns)
        return section

    def emit(self) -> None:
        """Give the report to every handler."""
        for handler in self._handlers:
            handler.emit(self._title, self._filled())

    def to_dict(self) -> dict[str, Any]:
        """The report for programs."""
        return _to_dict(self._title, self._filled())

    def _new(self, key: str, section: Section) -> Section:
        if key in self._sections:
            raise ValueError(f"a section {key!r} is there already")
        self._sections[key] = section
        return section

    def _filled(self) -> list[Section]:
        return [self._flat, *self._sections.values()]


class StreamHandler:
    """Prints to a stream, by default what is stdout when it prints."""

    def __init__(self, formatter: Formatter, stream: TextIO | None = None) -> None:
        self._formatter = formatter
        self._stream = stream

    def emit(self, title: str, sections: Sequence[Section]) -> None:
        """Print the report."""
        print(self._formatter.format(title, sections), file=self._stream or sys.stdout)


class FileHandler:
    """Writes to a file, by default as JSON."""

    def __init__(self, path: str | Path, formatter: Formatter | None = None) -> None:
        self._path = Path(path)
        self._formatter = formatter or _Json()

    def emit(self, title: str, sections: Sequence[Section]) -> None:
        """Write the report."""
        self._path.write_text(self._formatter.format(title, sections) + "\n", encoding="utf-8")


def get_formatter(name: str, *, width: int = 48, indent: int = 2) -> Formatter:
    """`terminal` (of `width` columns) or `json` (with `indent` spaces); ValueError for any other name."""
    if name == "terminal":
        return _Terminal(width)
    if name == "json":
        return _Json(indent)
    raise ValueError(f"formatter: expected terminal or json, got {name!r}")


class _Json:
    def __init__(self, indent: int = 2) -> None:
        self._indent = indent

    def format(self, title: str, sections: Sequence[Section]) -> str:
        return json.dumps(_to_dict(title, sections), indent=self._indent)


class _Terminal:
    def __init__(self, width: int) -> None:
        self._width = width

    def format(self, title: str, sections: Sequence[Section]) -> str:
        lines = [f" {title} ".center(self._width, "=")]
        for section in sections:
            if section.columns:
                lines += _table(section, self._width)
                continue
            if section.label:
                lines.append(f" {section.label} ".center(self._width, "-"))
            lines += [self._row(label, value) for _, label, value in section.entries]
        return "\n".join([*lines, "=" * self._width])

    def _row(self, label: str, value: Any) -> str:
        text = _shown(value)
        return f"{label}:{text:>{max(self._width - len(label) - 1, len(text) + 1)}}"


def _to_dict(title: str, sections: Sequence[Section]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    groups: dict[str, list[Any]] = {}
    for section in sections:
        if not section.key:
            metrics |= section.to_value()
        elif section.group:
            groups.setdefault(section.group, []).append(section.to_value())
        else:
            metrics[section.key] = section.to_value()
    return {"title": title, "metrics": metrics | groups}


def _table(section: Section, width: int) -> list[str]:
    """Header, a rule, and the rows; numbers stand to the right, and a text in the last column is wrapped to `width`."""
    if not section.rows:
        return ["(none)"]
    cells = [[header for _, header in section.columns]]
    cells += [[_shown(row.get(key)) for key, _ in section.columns] for row in section.rows]
    taken = sum(2 + max(len(row[i]) for row in cells) for i in range(len(section.columns) - 1))
    cells = [line for row in cells for line in _wrapped(row, max(NARROWEST, width - taken))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(section.columns))]
    numeric = [all(isinstance(row.get(key), (int, float)) for row in section.rows) for key, _ in section.columns]
    lines = [
        "  ".join(
            c.rjust(w) if right else c.ljust(w) for c, w, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]
    return [lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]


def _wrapped(row: list[str], width: int) -> list[list[str]]:
    """The row as lines, with a last cell of at most `width` characters each."""
    first, *others = textwrap.wrap(row[-1], width, break_on_hyphens=False) or [""]
    return [[*row[:-1], first], *([""] * (len(row) - 1) + [other] for other in others)]


def _shown(value: Any) -> str:
    return "N/A" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
