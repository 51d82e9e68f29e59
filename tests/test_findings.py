"""Findings: what is open, what is written, and that the log is bounded, honest and never in the way."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsweep.describe import byte_message, finding_id, prefix_hash, shown
from kvsweep.findings import Finding, Findings, FindingsLog
from kvsweep.publish import DEEP_CHECKS, LIGHT_CHECKS


def finding(slot: int = 7, check: str = "fingerprint", pass_number: int = 3, **fields: Any) -> Finding:
    made = Finding(
        id=finding_id(check, "full", None, slot, "p"),
        check=check,
        pool="full",
        segment=None,
        slot=slot,
        position=12,
        token=99,
        node="n4",
        namespace="",
        prefix_hash="00ff00ff00ff00ff",
        expected=shown(check, 1),
        actual=shown(check, -2),
        first_seen=100.0,
        confirmed_at=101.0,
        pass_number=pass_number,
        labels={"model_name": "m", "tp_rank": "0"},
        message="",
    )
    return replace(made, message="KV cache corruption confirmed", **fields)


def log(path: Path | None = None, **limits: int) -> FindingsLog:
    return FindingsLog(path, **{"max_bytes": 10_000, "backups": 2, "per_minute": 1000, **limits})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- what is open ------------------------------------------------------------------------------------------------


def test_a_fault_that_stays_is_one_finding() -> None:
    """I2: met in every pass, counted and written once, first seen when it was first seen."""
    findings = Findings(log())
    assert findings.confirm(finding(pass_number=3))
    assert not findings.confirm(finding(pass_number=4, first_seen=200.0))
    assert findings.confirmed == 1 and findings.open_counts() == {("full", "fingerprint"): 1}
    (known,) = findings.known()
    assert known["open"] and known["first_seen"] == 100.0 and known["pass"] == 3 and "pass_number" not in known


def test_a_finding_is_closed_by_a_pass_that_looked_for_it() -> None:
    """I6: open means met by the last pass of its kind; a deep pass says nothing of what only a light one sees."""
    findings = Findings(log())
    findings.confirm(finding(slot=1, pass_number=3))
    findings.confirm(finding(slot=2, pass_number=3))
    findings.confirm(finding(slot=3, check="free_in_tree", pass_number=9))
    findings.confirm(finding(slot=1, pass_number=4))
    findings.close_gone(DEEP_CHECKS, 4)
    assert {entry["slot"]: entry["open"] for entry in findings.known()} == {1: True, 2: False, 3: True}
    findings.close_gone(LIGHT_CHECKS, 10)
    assert findings.open_counts() == {("full", "fingerprint"): 1}
    findings.close(finding(slot=1).id)
    findings.close("never heard of")
    assert not findings.open_counts()
    assert findings.confirm(finding(slot=1, pass_number=6))  # come back: a new event
    assert findings.confirmed == 4


def test_memory_of_findings_is_bounded_and_counts_are_not() -> None:
    """I5, I6: the oldest are forgotten, the totals are not."""
    findings = Findings(log(), remembered=10)
    for slot in range(25):
        findings.confirm(finding(slot=slot))
    assert findings.confirmed == 25
    assert [entry["slot"] for entry in findings.known()] == list(range(15, 25))


def test_ids_tell_faults_apart() -> None:
    """I3: two faults must never be taken for one; the same fault keeps its id from pass to pass and run to run."""
    ids = {finding_id("chain", "full", "k", slot, "p") for slot in range(100_000)}
    assert len(ids) == 100_000
    assert finding_id("chain", "full", "k", 1, "p") == finding_id("chain", "full", "k", 1, "p")


# -- what it says ------------------------------------------------------------------------------------------------


def test_a_prefix_is_found_again_by_its_hash() -> None:
    """I6: namespace and tokens decide, not how the tokens are stored; any string a client may send has a hash."""
    tokens = np.array([1, 2, 3])
    assert (
        prefix_hash("", tokens)
        == prefix_hash("", tokens.astype(np.int32))
        == prefix_hash("", np.array([1, 9, 2, 9, 3])[::2])
    )
    others = [prefix_hash("tenant", tokens), prefix_hash("", tokens[:2]), prefix_hash("\ud800", tokens)]
    assert len({prefix_hash("", tokens), *others}) == 4
    assert len(finding_id("chain", "\ud800")) == 12


@pytest.mark.parametrize("check", DEEP_CHECKS)
def test_the_message_says_what_where_and_what_it_means(check: str) -> None:
    """I6: at 3 a.m. one line must do: pool, slot, layer, check, both values, prefix, and the consequence."""
    message = byte_message(finding(check=check, segment="layer3.k"))
    for part in ("full pool, slot 7 in layer3.k", f"check {check}", "Token 99 at position 12",
                 "prefix 00ff00ff00ff00ff", "wrong text until it is evicted or flushed"):  # fmt: skip
        assert part in message
    assert ("fffffffffffffffe" in message) == (check in ("fingerprint", "chain", "real_kv"))


# -- the log -----------------------------------------------------------------------------------------------------


def test_a_line_is_the_finding_as_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """I6: one JSON object a line in the file, the message and the id in the program's log."""
    path = tmp_path / "deep" / "findings.jsonl"  # directories are made
    writer = log(path)
    with caplog.at_level(logging.ERROR, logger="kvsweep"):
        assert writer.write(finding(namespace="\ud800 any string", detail={"slots": [1, 2]}))
    (line,) = lines(path)
    assert line == finding(namespace="\ud800 any string", detail={"slots": [1, 2]}).to_dict()
    assert f"KV cache corruption confirmed [finding {finding().id}]" in caplog.text


def test_the_file_is_there_before_the_first_finding(tmp_path: Path) -> None:
    """I6: a directory that cannot be written is known at start, and a log that works can be tailed at once."""
    path = tmp_path / "findings.jsonl"
    writer = log(path)
    assert path.exists() and writer.writable
    blocked = log(path / "a file is no directory")
    assert not blocked.writable


def test_the_rate_limit_counts_what_it_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: a storm of findings fills no disk, but is never mute: all are counted, and the next line says how many."""
    now = 1000.0
    monkeypatch.setattr("kvsweep.findings.time.monotonic", lambda: now)
    path = tmp_path / "findings.jsonl"
    findings = Findings(log(path, per_minute=3))
    for slot in range(10):
        findings.confirm(finding(slot=slot))
    assert len(lines(path)) == 3 and findings.log.suppressed == 7 and findings.confirmed == 10
    now += 59.9
    findings.confirm(finding(slot=11))
    now += 0.2
    findings.confirm(finding(slot=12))
    assert [line["slot"] for line in lines(path)] == [0, 1, 2, 12]
    assert lines(path)[-1]["suppressed_before"] == 8 and findings.log.suppressed == 8
    findings.confirm(finding(slot=13))
    assert "suppressed_before" not in lines(path)[-1]


@pytest.mark.parametrize("backups", [0, 1, 3])
def test_rotation_bounds_the_files_and_loses_the_oldest_only(tmp_path: Path, backups: int) -> None:
    """I5: never more than backups + 1 files of max_bytes; what is left is the newest, in order."""
    path = tmp_path / "findings.jsonl"
    writer = log(path, max_bytes=2000, backups=backups)
    for slot in range(60):
        writer.write(finding(slot=slot))
    files = sorted(tmp_path.iterdir())
    assert len(files) == backups + 1
    assert all(file.stat().st_size <= 2000 for file in files)
    newest_last = [path.with_name(f"findings.jsonl.{n}") for n in range(backups, 0, -1)] + [path]
    slots = [line["slot"] for file in newest_last for line in lines(file)]
    assert slots == list(range(60 - len(slots), 60))


def test_an_old_log_is_appended_to(tmp_path: Path) -> None:
    """I6: a restart overwrites nothing."""
    path = tmp_path / "findings.jsonl"
    for slot in (1, 2):
        writer = log(path)
        writer.write(finding(slot=slot))
        writer.close()
    assert [line["slot"] for line in lines(path)] == [1, 2]


def test_a_log_that_fails_never_raises_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """I4: the directory goes away mid-run; findings go on, one line says so, and the log is used again when it can."""
    directory = tmp_path / "logs"
    path = directory / "findings.jsonl"
    findings = Findings(log(path, max_bytes=10_000))
    findings.confirm(finding(slot=1))
    findings.log.close()
    path.unlink()
    directory.rmdir()
    directory.write_text("a file where the directory was")
    with caplog.at_level(logging.WARNING, logger="kvsweep"):
        findings.confirm(finding(slot=2))
        findings.confirm(finding(slot=3))
        assert not findings.log.writable and caplog.text.count("cannot be written") == 1
        directory.unlink()
        findings.confirm(finding(slot=4))
    assert findings.log.writable and "is writable again" in caplog.text
    assert [line["slot"] for line in lines(path)] == [4] and findings.confirmed == 4


def test_a_closed_file_under_the_log_is_survived(tmp_path: Path) -> None:
    """I4: someone closes the descriptor (a daemon library does that at fork): the next finding opens the file anew."""
    import os

    path = tmp_path / "findings.jsonl"
    writer = log(path)
    assert writer._file is not None
    os.close(writer._file.fileno())
    assert writer.write(finding(slot=1)) and not writer.writable
    assert writer.write(finding(slot=2)) and writer.writable
    assert [line["slot"] for line in lines(path)] == [2]


def test_open_findings_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: in a cache that is lost as a whole, findings beyond the limit are counted as suppressed, not kept."""
    monkeypatch.setattr("kvsweep.findings.MAX_OPEN", 3)
    log = FindingsLog(tmp_path / "f.jsonl", max_bytes=10_000_000, backups=0, per_minute=1000)
    findings = Findings(log)
    assert [findings.confirm(finding(slot=slot)) for slot in range(1, 6)] == [True, True, True, False, False]
    assert (findings.confirmed, log.suppressed, sum(findings.open_counts().values())) == (3, 2, 3)


def test_pinned_findings_stay_open_until_closed(tmp_path: Path) -> None:
    """I6: where fingerprints were dropped, a pass that no longer meets a byte fault has not shown that it healed."""
    findings = Findings(FindingsLog(None, max_bytes=10_000, backups=0, per_minute=1000))
    bytes_, stamp = finding(check="fingerprint"), finding(check="chain")
    assert findings.confirm(bytes_) and findings.confirm(stamp)
    findings.pin("fingerprint")
    findings.close_gone(DEEP_CHECKS, bytes_.pass_number + 1)
    assert findings.is_open(bytes_.id) and not findings.is_open(stamp.id)
    findings.close(bytes_.id)
    assert not findings.is_open(bytes_.id) and not findings.pinned
