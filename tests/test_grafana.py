"""Dashboards and Grafana's provisioning: generated, valid, complete, and about series that exist (issue 7, item 1)."""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_support import DASHBOARDS, ROOT, need, panel_queries
from test_alerts import ALERTS, GROUPS, RECORDED
from test_metrics import CONTRACT

pytest.importorskip("grafana_foundation_sdk", reason="needs the grafana-foundation-sdk package")

PANELS = [(name, panel) for name, board in DASHBOARDS.items() for panel in board["panels"] if panel["type"] != "row"]
PANEL_IDS = [f"{name}:{panel['title']}" for name, panel in PANELS]
PROVISIONING = ROOT / "grafana/provisioning"


def provisioned(path: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((PROVISIONING / path).read_text())
    return loaded


def test_generated_files_are_up_to_date() -> None:
    """Issue 7: the committed JSON and YAML are what the code and the one source of rules give."""
    command = [sys.executable, str(ROOT / "deploy/generate.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_check_notices_a_stale_file(tmp_path: Path) -> None:
    """Issue 7: `generate.py --check` fails where a generated file was edited or is missing, and names it."""
    for part in ("deploy", "grafana"):
        subprocess.run(["cp", "-r", str(ROOT / part), str(tmp_path / part)], check=True)
    edited = tmp_path / "grafana/dashboards/overview.json"
    edited.write_text(edited.read_text().replace("Ranks not swept", "Ranks"))
    (tmp_path / "deploy/kubernetes/base/prometheusrule.yml").unlink()
    command = [sys.executable, str(tmp_path / "deploy/generate.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "grafana/dashboards/overview.json is not up to date" in result.stdout
    assert "deploy/kubernetes/base/prometheusrule.yml is not up to date" in result.stdout


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboard_fits_grafanas_schema(name: str) -> None:
    """Issue 7: read into the SDK's models of Grafana's schema and written again, nothing is lost or changed."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    board = copy.deepcopy(DASHBOARDS[name])
    again = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    for annotation in board["annotations"]["list"]:  # the schema of annotations has no field for these two
        assert annotation.pop("titleFormat") and annotation.pop("textFormat")
    assert again == board


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboard_has_variables_links_and_annotations(name: str) -> None:
    """Issue 7: variables, a link to the other dashboard with the selection kept, violations as annotations."""
    board = DASHBOARDS[name]
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == ["datasource", "job", "model_name", "instance", "tp_rank", "dp_rank"]
    link = board["links"][0]
    assert link["type"] == "dashboards" and set(link["tags"]) <= set(board["tags"])
    assert link["includeVars"] and link["keepTime"]
    assert any("kvsweep_violations_total" in a.get("expr", "") for a in board["annotations"]["list"])


def test_the_table_of_ranks_leads_to_the_ranks_own_dashboard() -> None:
    """Issue 7: links between the two: a click on an instance opens its detail by the uid that exists."""
    text = json.dumps(DASHBOARDS["overview"])
    assert f"/d/{DASHBOARDS['rank-detail']['uid']}?" in text


@pytest.mark.parametrize(("name", "panel"), PANELS, ids=PANEL_IDS)
def test_panel_explains_itself(name: str, panel: dict[str, Any]) -> None:
    """Issue 7: what it shows, which metric, what to do when it is red; "no data" reads as words."""
    text = panel["description"]
    what, metric, red = text.split("\n\n")
    assert what.endswith(".") and metric.startswith("Metric: `") and red.startswith("When it is red")
    for series in re.findall(r"kvsweep_\w+", " ".join(query["expr"] for query in panel["targets"])):
        assert f"`{re.sub('_bucket$|_sum$|_count$', '', series)}`" in metric
    assert " " in panel["fieldConfig"]["defaults"]["noValue"]
    for section in re.findall(r"Kvsweep\w+", red):
        assert section in ALERTS
    assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize(("name", "panel"), PANELS, ids=PANEL_IDS)
def test_panel_queries_follow_the_variables(name: str, panel: dict[str, Any]) -> None:
    """Issue 7: every query narrows with the variables, and every rate follows the zoom by $__rate_interval."""
    for query in panel["targets"]:
        selectors = re.findall(r"kvsweep_\w+(\{[^}]*\})?", query["expr"])
        assert all('model_name=~"$model_name"' in selector for selector in selectors)
        assert re.findall(r"rate\(\w+\{[^}]*\}\[([^\]]+)\]", query["expr"]) == ["$__rate_interval"] * query[
            "expr"
        ].count("rate(")


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_overlap(name: str) -> None:
    """Issue 7: a dashboard that looks right without anybody moving panels about."""
    boxes = [panel["gridPos"] for panel in DASHBOARDS[name]["panels"]]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    for one, two in itertools.combinations(boxes, 2):
        apart_x = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert apart_x or apart_y, (one, two)


def test_every_series_is_on_a_dashboard_and_none_is_invented() -> None:
    """DESIGN section 9: what is exported can be seen, what is shown is exported."""
    shown = set(re.findall(r"kvsweep_\w+", " ".join(query for _, _, query in panel_queries())))
    known = {f"kvsweep_{name}" for name in CONTRACT}
    shown = {name if name in known else re.sub(r"_(bucket|count|sum)$", "", name) for name in shown}
    assert shown == known


@pytest.mark.prometheus
def test_every_expression_is_promql(tmp_path: Path) -> None:
    """Issue 7: each panel's expression parses in Prometheus's own parser."""
    rules = [{"record": f"panel:{i}", "expr": query} for i, (_, _, query) in enumerate(panel_queries())]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    result = subprocess.run([need("promtool"), "check", "rules", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_grafana_rules_are_the_prometheus_rules() -> None:
    """Issue 7: one source: the same alerts with the same expressions, delays, labels and runbook sections."""
    rules = [rule for group in provisioned("alerting/rules.yml")["groups"] for rule in group["rules"]]
    assert [rule["title"] for rule in rules] == list(ALERTS)
    assert len({rule["uid"] for rule in rules}) == len(rules) and all(len(rule["uid"]) <= 40 for rule in rules)
    for rule in rules:
        source = ALERTS[rule["title"]]
        query, condition = rule["data"]
        assert query["model"]["expr"] == source["expr"] and rule["for"] == source.get("for", "0s")
        assert rule["labels"] == source["labels"]
        assert rule["annotations"]["runbook_url"] == source["annotations"]["runbook_url"]
        assert rule["condition"] == condition["refId"] and condition["model"]["expression"] == "$A ** 0"
        # Provisioning may take $name for a variable of the environment, so templates must do without.
        assert "$" not in " ".join(rule["annotations"].values())
        assert query["datasourceUid"] == provisioned("datasources/prometheus.yml")["datasources"][0]["uid"]


def test_grafana_alerting_fits_its_schema() -> None:
    """Issue 7: rules, contact points and policies keep every field through the SDK's models of Grafana's alerting."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.alerting import ContactPoint, NotificationPolicy, Rule

    def lost(model: Any, data: dict[str, Any]) -> set[str]:
        again = json.loads(json.dumps(model.from_json(data), cls=JSONEncoder))
        return {name for name, value in data.items() if again.get(name) != value}

    for group in provisioned("alerting/rules.yml")["groups"]:
        assert {"orgId", "name", "folder", "interval", "rules"} == set(group)
        assert [lost(Rule, rule) for rule in group["rules"]] == [set()] * len(group["rules"])
    for point in provisioned("alerting/contact-points.yml")["contactPoints"]:
        assert [lost(ContactPoint, receiver) for receiver in point["receivers"]] == [set()]
    (policy,) = provisioned("alerting/notification-policies.yml")["policies"]
    assert lost(NotificationPolicy, policy) == {"orgId", "routes"}  # provisioning's own; routes next
    matchers = {"object_matchers"}  # the SDK reads but does not write them
    assert [lost(NotificationPolicy, route) for route in policy["routes"]] == [matchers]


def test_notification_policies_name_contact_points_that_exist() -> None:
    """Issue 7: the examples of contact points and policies fit together and route by the severities in use."""
    points = {point["name"] for point in provisioned("alerting/contact-points.yml")["contactPoints"]}
    policy = provisioned("alerting/notification-policies.yml")["policies"][0]
    assert {policy["receiver"], *(route["receiver"] for route in policy["routes"])} <= points
    severities = {rule["labels"]["severity"] for rule in ALERTS.values()}
    assert {value for route in policy["routes"] for _, _, value in route["object_matchers"]} <= severities


def test_recording_rules_are_named_by_level_metric_operation() -> None:
    """Issue 7: recording rules for the fleet, named as Prometheus's convention has it."""
    assert len(RECORDED) == len(set(RECORDED)) and any(name.startswith("model:") for name in RECORDED)
    assert all(re.fullmatch(r"(rank|model):kvsweep_\w+:\w+", name) for name in RECORDED)
    assert GROUPS[0]["name"] == "kvsweep-recording"  # evaluated before the alerts that read them
