"""The plugin in a real SGLang server (issue 4, item 9)."""

from __future__ import annotations

import json
import signal

import psutil
import pytest

pytest.importorskip("sglang.srt", reason="needs SGLang 0.5.23: tests/sglang/cpu_server/setup.sh VENV")

from server import Server, until

from kvsweep import doctor

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

CONFIGS = {
    "rust": ((), {}),
    "python-page16": (("--page-size", "16"), {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    flags, environment = CONFIGS[request.param]
    running = Server(tmp_path_factory.mktemp(request.param), *flags, **environment)
    yield running
    running.kill()


def sealed(server: Server) -> dict:
    """Passes until every resident slot has a trusted fingerprint."""
    return until(
        lambda: (
            (status := server.passes(1))["coverage"]["pools"][0]["fingerprinted"]
            == status["coverage"]["pools"][0]["resident"]
            > 0
            and status
        ),
        60,
        "all resident slots fingerprinted",
    )


def test_clean_traffic_gives_no_findings_and_moves_the_metrics(server: Server):
    """I2 and I6: prefix hits under load, several passes: zero findings; what is counted matches SGLang's own walk."""
    done = server.traffic(120)
    assert done["requests"] == 120 and done["cached"] > 500
    status = sealed(server)
    assert status["findings"]["confirmed"] == 0 and status["findings"]["open"] == 0
    assert status["errors"] == {}
    pool = status["coverage"]["pools"][0]
    assert pool["resident"] == server.ask(do="walk")["slots"]
    assert status["passes"]["light"] >= 2
    assert pool["skipped"].get("untracked", 0) == 0
    labels = {"pool": "full", "check": "fingerprint"}
    before = server.metric("kvsweep_slots_verified_total", **labels)
    server.passes(2)
    assert server.metric("kvsweep_slots_verified_total", **labels) > before
    assert server.metric("kvsweep_up") == 1
    assert server.metric("kvsweep_slots_resident", pool="full") == pool["resident"]
    assert server.metric("kvsweep_up", port=server.port, tp_rank="0") == 1  # also in SGLang's own /metrics
    (announced,) = json.loads((server.log.parent / "sd" / "kvsweep-rank0.json").read_text())
    assert announced["targets"] == [f"127.0.0.1:{server.sweep_port}"]  # for Prometheus's file_sd


def test_doctor_on_a_running_server(server: Server):
    """Issue 4, item 8: the doctor finds everything and says what would be covered there."""
    lines: list[str] = []
    assert doctor.main(f"http://127.0.0.1:{server.port}", lines.append) == 0
    report = "\n".join(lines)
    assert "FAIL" not in report
    for said in ("SGLang 0.5.23 at http", "KV pools", "1: one sweeper and one port each", "export KVSWEEP_ENABLED=1"):
        assert said in report


def test_an_idle_server_is_swept(server: Server):
    """Issue 4: passes go on while no request arrives, without waking the scheduler's loop."""
    begin = server.status()["passes"]["deep"]
    until(lambda: server.status()["passes"]["deep"] >= begin + 3, 30, "three passes while idle")


@pytest.mark.parametrize(("half", "layer"), [("k", 0), ("k", 1), ("v", 1)])
def test_a_flipped_byte_is_found_and_nothing_else(server: Server, half: str, layer: int):
    """I3: one byte past what SGLang's canary reads, in any layer and half: exactly that slot is reported."""
    server.traffic(8, seed=3)
    sealed(server)
    counted = server.metric("kvsweep_violations_total", pool="full", check="fingerprint")
    flip = server.ask(do="flip", half=half, layer=layer, position=5)
    until(server.open_findings, 30, "the flip is found")
    server.passes(1)
    new = server.open_findings()
    assert [(f["check"], f["pool"], f["slot"], f["position"]) for f in new] == [
        ("fingerprint", "full", flip["slot"], flip["position"])
    ]
    assert server.metric("kvsweep_violations_total", pool="full", check="fingerprint") == counted + 1
    logged = [json.loads(line) for line in server.findings_log.read_text().splitlines()]
    assert any(entry["id"] == new[0]["id"] and entry["slot"] == flip["slot"] for entry in logged)
    assert "KV cache corruption confirmed" in server.log.read_text()
    server.ask(do="unflip")
    until(lambda: not server.open_findings(), 30, "the finding closes once the byte is right again")


def test_flush_and_aborts_under_load_raise_no_alarm(server: Server):
    """I2: 240 requests with clients that hang up, flushes in between, memory released and resumed: nothing found."""
    before = server.status()["findings"]["confirmed"]
    aborted = 0
    for round_ in range(3):
        aborted += server.traffic(100, seed=10 + round_, abort=True)["aborted"]
        until(lambda: server.http.post("/flush_cache").status_code == 200, 30, "flush while idle")
        server.passes(1)
    assert aborted >= 30
    until(lambda: server.http.get("/health").status_code == 200, 30, "healthy")
    server.ask(do="release")
    until(lambda: "released its KV memory" in server.log.read_text(), 20, "the sweeper notices the release")
    server.ask(do="resume")
    server.traffic(8, seed=3)
    status = sealed(server)
    assert status["findings"]["confirmed"] == before
    assert status["errors"] == {}


def test_sigterm_ends_everything(server: Server):
    """I8: the launcher ends in good time, and no process of the tree is left."""
    tree = psutil.Process(server.process.pid).children(recursive=True)
    assert tree
    server.terminate()
    _, left = psutil.wait_procs(tree, timeout=20)
    assert left == []
    assert "kvsweep: could not" not in server.log.read_text()


def test_a_broken_configuration_leaves_serving_alone(tmp_path):
    """I4: one ERROR line that names the knob, `kvsweep_up` 0, and the server serves."""
    server = Server(tmp_path, KVSWEEP_INTENSITY="frantic")
    try:
        assert server.generate(list(range(10, 40)))["meta_info"]["prompt_tokens"] == 30
        lines = [line for line in server.log.read_text().splitlines() if "kvsweep is off" in line]
        assert len(lines) == 1 and "intensity" in lines[0] and "frantic" in lines[0]
        assert server.metric("kvsweep_up", port=server.port) == 0
    finally:
        server.kill()


def test_stamps_of_a_running_canary_are_verified(tmp_path):
    """Issue 4, item 4: beside SGLang's own canary: K and V stamps agree under traffic, and a bit flipped in what they
    were taken over is reported by both checks, for that slot only."""
    server = Server(tmp_path, SGLANG_CANARY="1", SGLANG_KV_CANARY_ENABLE_MHA_V="1")
    try:
        assert server.traffic(24)["requests"] == 24
        status = sealed(server)
        assert status["findings"]["confirmed"] == 0
        verified = status["coverage"]["pools"][0]["verified"]
        assert all(verified[check] > 0 for check in ("chain", "position", "token", "real_kv"))
        for half in ("k", "v"):
            flip = server.ask(do="flip", half=half, layer=0, position=5, byte=3)
            until(lambda: len(server.open_findings()) >= 2, 60, "fingerprint and real_kv")
            server.passes(1)
            found = sorted((f["check"], f["segment"], f["slot"]) for f in server.open_findings())
            assert found == [("fingerprint", None, flip["slot"]), ("real_kv", half, flip["slot"])]
            server.ask(do="unflip")
            until(lambda: not server.open_findings(), 60, "closed")
    finally:
        server.kill()


def test_metrics_inside_sglang_and_exit_on_violation(tmp_path):
    """Issue 4, items 6 and 7: KVSWEEP_METRICS=engine opens no port, the series are in SGLang's /metrics with its ranks;
    KVSWEEP_ON_VIOLATION=exit ends the scheduler with the finding as its last word."""
    server = Server(tmp_path, KVSWEEP_METRICS="engine", KVSWEEP_ON_VIOLATION="exit")
    try:
        server.traffic(8)

        def passes() -> float:
            return server.metric("kvsweep_passes_total", port=server.port, kind="deep") or 0

        begin = passes()
        until(lambda: passes() >= begin + 4, 60, "enough passes to trust every fingerprint")
        assert server.metric("kvsweep_up", port=server.port, tp_rank="0", pp_rank="0", dp_rank="0") == 1
        children = psutil.Process(server.process.pid).children(recursive=True)
        listening = {c.laddr.port for child in children for c in child.net_connections() if c.status == "LISTEN"}
        assert server.sweep_port not in listening
        scheduler = next(child for child in children if "scheduler" in child.name())
        server.ask(do="flip", half="k", layer=1, position=5)
        assert scheduler.wait(30) in (0, None, -signal.SIGTERM)
        entries = [json.loads(line) for line in server.findings_log.read_text().splitlines()]
        assert [entry["check"] for entry in entries] == ["fingerprint"]
        said = server.log.read_text()
        assert said.index("KV cache corruption confirmed") < said.index("crashed with exit code")
    finally:
        server.kill()
