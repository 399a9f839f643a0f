"""The shape of an answer to a reviewer: its question, its job, a table, and what the table says."""

from dataclasses import dataclass

from bidirl.sim.reality.table import markdown_table

__all__ = ["Section"]


@dataclass(frozen=True, slots=True)
class Section:
    """One question, its job, its table, and what the table says."""

    title: str
    job: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    finding: str

    def to_markdown(self) -> str:
        """Return the section; ends with a newline."""
        table = markdown_table(self.head, self.rows)
        return f"### {self.title}\n\nJob: {self.job}.\n\n{table}\n\n{self.finding}\n"
