"""The table of faults can be provoked in part: what was not provoked now stands as it was."""

from __future__ import annotations

from tests.faults import table
from tests.faults.__main__ import TABLE


def row(fault: str, slurm: str, **fields: object) -> table.Record:
    return {
        "kind": "Odd | ends", "fault": fault, "slurm": slurm, "seen": "FAILED", "code": "1", "left": "nothing",
        "seconds": 1.25, **fields,
    }  # fmt: skip


def test_the_documents_table_is_read_back_to_the_letter() -> None:
    text = TABLE.read_text(encoding="utf-8")
    assert table.render(table.read(text)) == text


def test_rows_provoked_now_take_the_place_of_their_own_and_of_no_other() -> None:
    old = [row(fault, slurm) for fault in ("a | b\nc", "d") for slurm in ("22.05", "24.11")]
    before = table.render(old)
    new = [row("a | b\nc", "22.05", seen="SUCCEEDED", seconds=None)]
    after = table.render(table.merged(table.read(before), new))
    changed = [pair for pair in zip(before.splitlines(), after.splitlines()) if pair[0] != pair[1]]
    assert len(before.splitlines()) == len(after.splitlines())
    assert changed == [
        (
            r"| a \| b c | FAILED | 1 | nothing | 1.2 | 1.2 |",
            r"| a \| b c | SUCCEEDED | 1 | nothing |  | 1.2 |",
        )
    ]
