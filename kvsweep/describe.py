"""From a confirmed suspect to the finding an operator reads. The caller does not hold the gate."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace

import numpy as np

from kvsweep.checks.suspects import Candidate
from kvsweep.engine import Engine
from kvsweep.findings import Finding
from kvsweep.plan import Plan
from kvsweep.verify import Suspect

HASHES = ("chain", "real_kv", "fingerprint")  # checks whose expected and actual are 64-bit hashes
WHAT_DIFFERS = {
    "fingerprint": "its bytes changed since two earlier reads agreed",
    "real_kv": "its bytes are not those its stamp was taken over",
    "chain": "its stamp does not continue the slot before it",
    "position": "it was written for another position",
    "token": "it was written for another token",
    "not_finite": "it holds an Inf or a NaN",
}


def byte_finding(
    engine: Engine, plan: Plan, suspect: Suspect, slot: int, first_seen: float, pass_number: int
) -> Finding:
    """The finding for a suspect of the deep pass, one row of `plan` and its slot in the pool's own numbering. Its
    prefix is None if that was evicted."""
    span, position = int(plan.span_of[suspect.row]), int(plan.positions[suspect.row])
    node = plan.spans.nodes[span]
    with engine.gate.held():
        namespace, tokens = engine.tree.prefix(node, position)
    prefix = prefix_hash(namespace, tokens) if len(tokens) > position else None
    finding = Finding(
        id=finding_id(suspect.check, plan.pool.name, suspect.segment, slot, prefix),
        check=suspect.check,
        pool=plan.pool.name,
        segment=suspect.segment,
        slot=slot,
        position=position,
        token=int(engine.tree.tokens(plan.spans.keys[span])[position - plan.spans.starts[span]]),
        node=engine.tree.node_name(node),
        namespace=namespace,
        prefix_hash=prefix,
        expected=shown(suspect.check, suspect.expected),
        actual=shown(suspect.check, suspect.actual),
        first_seen=first_seen,
        confirmed_at=time.time(),
        pass_number=pass_number,
        labels=dict(engine.labels),
        message="",
    )
    return replace(finding, message=byte_message(finding))


def byte_message(finding: Finding) -> str:
    """The line an operator reads for a finding of the deep pass."""
    where = f" in {finding.segment}" if finding.segment else ""
    return (
        f"KV cache corruption confirmed: {finding.pool} pool, slot {finding.slot}{where}: "
        f"{WHAT_DIFFERS[finding.check]} (check {finding.check}, expected {finding.expected}, found {finding.actual}). "
        f"Token {finding.token} at position {finding.position} of prefix {finding.prefix_hash or '(evicted since)'}, "
        f"node {finding.node}. "
        "Requests that share this prefix get wrong text until it is evicted or flushed."
    )


def structural_finding(engine: Engine, candidate: Candidate, pass_number: int) -> Finding:
    """The finding for a candidate of the light pass; its detail lists all slots, nodes and requests."""
    position = candidate.positions[0] if candidate.positions else None
    namespace, tokens = "", np.empty(0, np.int64)
    if candidate.nodes and position is not None:
        with engine.gate.held():
            namespace, tokens = engine.tree.prefix(candidate.nodes[0], position)
    known = position is not None and len(tokens) == position + 1  # else it was evicted meanwhile
    names = candidate.detail["nodes"]
    now = time.time()
    return Finding(
        id=finding_id(candidate.check, candidate.pool, candidate.slots, names, candidate.detail["requests"]),
        check=candidate.check,
        pool=candidate.pool,
        segment=None,
        slot=candidate.slots[0] if candidate.slots else None,
        position=position,
        token=int(tokens[-1]) if known else None,
        node=names[0] if names else None,
        namespace=namespace,
        prefix_hash=prefix_hash(namespace, tokens) if known else None,
        expected=None,
        actual=None,
        first_seen=now,
        confirmed_at=now,
        pass_number=pass_number,
        labels=dict(engine.labels),
        message=f"KV cache structure violated: {candidate.message}",
        detail={**candidate.detail, "slots": list(candidate.slots)},
    )


def prefix_hash(namespace: str, tokens: np.ndarray) -> str:
    """16 hex digits of BLAKE2b over the namespace and the int64 tokens [n] of a prefix."""
    digest = hashlib.blake2b(namespace.encode("utf-8", "surrogatepass") + b"\0", digest_size=8)  # a client may send any
    digest.update(np.ascontiguousarray(tokens, dtype="<i8").tobytes())
    return digest.hexdigest()


def finding_id(*parts: object) -> str:
    """12 hex digits that name a fault; the same parts give the same id. Two faults that met in one id would be taken
    for one: among 10,000 open ones the chance is below 1e-6."""
    return hashlib.blake2b(ascii(parts).encode(), digest_size=6).hexdigest()


def shown(check: str, value: int) -> int | str:
    """A compared value as a finding shows it: hashes as 16 hex digits, the rest as it is."""
    return f"{value & (2**64 - 1):016x}" if check in HASHES else value
