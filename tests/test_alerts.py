"""Alert and recording rules: checked and run by promtool, documented one by one (issue 7, items 2 and 5)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_support import need
from test_metrics import CONTRACT

DEPLOY = Path(__file__).parent.parent / "deploy"
RULES = DEPLOY / "prometheus/kvsweep.rules.yml"
CASES = DEPLOY / "prometheus/kvsweep.rules.test.yml"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule
}
RECORDED = [rule["record"] for group in GROUPS for rule in group["rules"] if "record" in rule]


@pytest.mark.prometheus
def test_promtool_accepts_the_rules() -> None:
    """Issue 7: `promtool check rules`, which also parses every annotation template."""
    result = subprocess.run([need("promtool"), "check", "rules", str(RULES)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.prometheus
def test_promtool_runs_every_case() -> None:
    """Issue 7: each alert fires when it must and stays quiet when it must, by Prometheus's own engine."""
    command = [need("promtool"), "test", "rules", CASES.name]
    result = subprocess.run(command, cwd=CASES.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.prometheus
def test_the_cases_notice_a_deaf_alert(tmp_path: Path) -> None:
    """Issue 7: the cases guard something: with all alerts made deaf, promtool names each of them."""
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["expr"] = f"({rule['expr']}) and on () (vector(1) == 2)"
    (tmp_path / RULES.name).write_text(yaml.safe_dump(rules))
    (tmp_path / CASES.name).write_text(CASES.read_text())
    command = [need("promtool"), "test", "rules", CASES.name]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode != 0
    assert set(re.findall(r'alertname="(\w+)"', result.stdout + result.stderr)) == set(ALERTS)


def test_every_alert_has_a_loud_and_a_quiet_moment() -> None:
    """Issue 7: a case for every alert; in the same case it is silent at one moment and fires at another."""
    proven = set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        moments = case["promql_expr_test"]
        fired = {
            name
            for moment in moments
            for sample in moment["exp_samples"]
            for name in re.findall(r'alertname="(\w+)"', sample["labels"])
        }
        if any(not moment["exp_samples"] and "ALERTS" in moment["expr"] for moment in moments):
            proven |= fired
    assert proven == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_alert_says_where_and_what_to_do(name: str) -> None:
    """Issue 7: severity, summary, description with the rank, and a runbook section in the order means, look, do."""
    rule = ALERTS[name]
    notes = rule["annotations"]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert "{{ $labels." in notes["summary"] and len(notes["summary"]) < 110
    by_rank = name not in ("KvsweepUnreachable", "KvsweepNotRunning")  # what is absent has no rank
    for label in ("instance", "model_name", "tp_rank", "pp_rank", "dp_rank") if by_rank else ():
        assert f"$labels.{label}" in " ".join(notes["description"].split())
    path, anchor = notes["runbook_url"].split("#")
    assert (path, anchor) == ("deploy/RUNBOOK.md", name.lower())
    section = runbook()[name]
    order = [section.index(f"**{part}.**") for part in ("What it means", "What to look at", "What to do")]
    assert order == sorted(order)


def test_only_corruption_wakes_somebody_up() -> None:
    """Issue 7: the page is for wrong text being served; the scrubber's own troubles are tickets."""
    assert [name for name, rule in ALERTS.items() if rule["labels"]["severity"] == "critical"] == [
        "KvsweepCorruptionConfirmed"
    ]


def test_runbook_has_no_orphans() -> None:
    """Issue 7: a section for each alert, none for an alert that is gone, in the order of the rules."""
    assert list(runbook()) == list(ALERTS)


def test_rules_use_only_series_that_exist() -> None:
    """DESIGN section 9: a rule over a misspelt series never fires, and promtool does not notice."""
    names = set()
    for group in GROUPS:
        for rule in group["rules"]:
            names |= set(re.findall(r"\b(kvsweep_\w+|(?:rank|model):\w+:\w+)", rule["expr"]))
    known = {f"kvsweep_{name}" for name in CONTRACT} | set(RECORDED)
    assert {re.sub(r"_(bucket|count|sum)$", "", name) if name not in known else name for name in names} <= known


def test_runbook_names_settings_that_exist() -> None:
    """Issue 7: at 3 a.m. a setting that the runbook names must be one that kvsweep reads."""
    from kvsweep.config import Settings

    named = set(re.findall(r"KVSWEEP_([A-Z_]+)", (DEPLOY / "RUNBOOK.md").read_text()))
    assert named and named <= {name.upper() for name in Settings.model_fields} | {"ENABLED"}  # the plugin's switch


def runbook() -> dict[str, str]:
    """Section title -> text."""
    _, *sections = re.split(r"(?m)^## ", (DEPLOY / "RUNBOOK.md").read_text())
    return {section.split("\n", 1)[0]: section for section in sections}
