"""A report: titled sections of named values, for a person's terminal or for a program as JSON.

    Report("Ping KV Cache") -> .section("results", "Results") -> .add("duration", "Duration (s)", 1.2)

Terminal: the title centred in `=`, labelled sections in `-`, labels left and values right, floats with two decimals.
JSON: `{"title": ..., "metrics": {flat entries, section: {...}, list group: [{...}]}}`, values as they are.
"""

import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Report", "Section"]


@dataclass
class Section:
    """Named values under one label."""

    key: str
    label: str
    in_list: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, label: str, value: Any) -> None:
        """One value: `key` for programs, `label` for people."""
        self.values[key] = value
        self.labels[key] = label


class Report:
    """A title, flat values first, then sections in the order they were added."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._flat = Section("", "")
        self._sections: list[Section] = []

    def add(self, key: str, label: str, value: Any) -> None:
        """One value outside of any section."""
        self._flat.add(key, label, value)

    def section(self, key: str, label: str, *, in_list: bool = False) -> Section:
        """A new section; with `in_list`, one element of the list `key`."""
        section = Section(key, label, in_list)
        self._sections.append(section)
        return section

    def to_dict(self) -> dict[str, Any]:
        """The report for programs."""
        metrics: dict[str, Any] = dict(self._flat.values)
        for section in self._sections:
            if section.in_list:
                metrics.setdefault(section.key, []).append(dict(section.values))
            else:
                metrics[section.key] = dict(section.values)
        return {"title": self.title, "metrics": metrics}

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_text(self, width: int) -> str:
        """The report for a terminal of `width` columns."""
        lines = [f" {self.title} ".center(width, "=")]
        for section in [self._flat, *self._sections]:
            if section.label:
                lines.append(f" {section.label} ".center(width, "-"))
            lines += [_row(section.labels[key] + ":", value, width) for key, value in section.values.items()]
        return "\n".join([*lines, "=" * width])


def _row(label: str, value: Any, width: int) -> str:
    text = "N/A" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label}{text:>{max(width - len(label), len(text) + 1)}}"
