"""What the kernels compile to, ahead of time and without a GPU, for the architectures that kvsweep is meant for.

`python tests/test_kernels_aot.py` prints the table of one architecture after another (docs quote it).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)  # some 50 compilations

REPOSITORY = Path(__file__).parent.parent
ARCHITECTURES = (80, 90, 100)
SHARED = {"BLOCK_SLOTS": 256}

# Threads of a program x registers of a thread may not pass the register file of an SM.
REGISTER_FILE = 65_536

# Bound on registers a thread, by kernel. The plain fingerprint kernel runs 16 warps: 128 is all there is for them.
# The others run 4 or 8 and share their SM with nothing of ours.
REGISTERS = {"fingerprint": 128, "fingerprint per segment": 192, "fingerprint finite": 192, "stamps": 128, "states": 64}


def variants() -> dict[str, tuple[str, dict[str, Any], int]]:
    """name -> (kernel, constants, warps): the shapes that `fingerprint_shape` chooses, and the other kernels."""
    import torch

    from kvsweep.pool import Segment
    from kvsweep.verify.kernels import COMMIT, CONTRADICT, fingerprint_shape

    found: dict[str, tuple[str, dict[str, Any], int]] = {}
    for row_bytes in (1024, 512, 256, 1152):  # the last: 72 words, 16 a tile, an MLA row in bfloat16
        row = Segment.slot_major("k", torch.zeros(2, row_bytes, dtype=torch.uint8))
        for name, per_segment, finite in (
            ("fingerprint", False, False),
            ("fingerprint per segment", True, False),
            ("fingerprint finite", False, True),
            ("fingerprint finite per segment", True, True),
        ):
            if (per_segment or finite) and row_bytes in (512, 256):
                continue  # the widest and the narrowest tile bound the others
            constants: dict[str, Any] = fingerprint_shape((row,), per_segment=per_segment, finite=finite)
            warps = constants.pop("num_warps")
            found[f"{name}, {constants['BLOCK_WORDS']} words"] = ("fingerprint_kernel", constants, warps)
    for real_kv in (False, True):
        found[f"stamps, real_kv {real_kv}"] = ("stamp_kernel", {**SHARED, "REAL_KV": real_kv}, 8)
    for step in (CONTRADICT, COMMIT):
        constants = {**SHARED, "STEP": step, "PER_SEGMENT": True}
        found[f"states, settle {step}"] = ("settle_kernel", constants, 4)
    for kernel in ("mark_kernel", "forget_kernel", "alive_kernel"):
        found[f"states, {kernel}"] = (kernel, SHARED, 4)
    found["states, count_sealed_kernel"] = ("count_sealed_kernel", {"BLOCK": 4096}, 4)
    # Triton compiles an argument that is 1 as a constant: a pool of one segment, a stamp of one source.
    kernel, constants, warps = found["fingerprint, 128 words"]
    found["fingerprint, 128 words, one segment"] = (kernel, {**constants, "num_segments": 1}, warps)
    kernel, constants, warps = found["stamps, real_kv True"]
    found["stamps, real_kv True, one source"] = (kernel, {**constants, "num_sources": 1}, warps)
    return found


def compile_one(kernel_name: str, constants: dict[str, Any], warps: int, target: Any) -> Any:
    """One kernel as `CudaVerifier` launches it: buffers of its own are 16-byte aligned, the chunk's need not be."""
    import triton
    from triton.compiler import ASTSource

    from kvsweep.verify import kernels

    kernel = getattr(kernels, kernel_name)
    loose = {"slots_ptr", "positions_ptr", "prevs_ptr", "tokens_ptr", "alive_ptr"}
    pointers = {"a_ptr": "*u64", "b_ptr": "*u64", "state_ptr": "*u8", "alive_ptr": "*u8"}
    signature, attrs = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = pointers.get(name, "*i64")
            if name not in loose:
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=target, options={"num_warps": warps})


def assemble(ptx: str) -> tuple[dict[str, int], str]:
    """What ptxas says of registers and spills, and the machine code."""
    import triton.backends.nvidia

    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    arch = re.search(r"\.target (\w+)", ptx)[1]
    ptxas = tools / ("ptxas-blackwell" if int(re.sub(r"\D", "", arch)) >= 100 else "ptxas")
    work = Path(os.environ["TRITON_CACHE_DIR"])
    (work / "kernel.ptx").write_text(ptx)
    said = subprocess.run(
        [ptxas, "-v", f"--gpu-name={arch}", work / "kernel.ptx", "-o", work / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    numbers = {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": int(re.search(r"(\d+) bytes spill stores", said)[1]),
        "stack": int(re.search(r"(\d+) bytes stack frame", said)[1]),
    }
    code = subprocess.run([tools / "nvdisasm", "-c", work / "kernel.cubin"], capture_output=True, text=True, check=True)
    return numbers, code.stdout


def wide_loop(sass: str) -> list[str]:
    """Opcodes of the innermost loop that holds the 128-bit evict-first loads: the loop that the sweep lives in."""
    lines = [line.strip() for line in sass.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    loops = []
    for end, line in enumerate(lines):
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if jump and labels.get(jump[1], end) < end:
            body = lines[labels[jump[1]] : end + 1]
            if any("LDG.E.EF.128" in one or ("LDG.E.128" in one and ".EF" in one) for one in body):
                loops.append(body)
    shortest = min(loops, key=len)
    opcodes = (re.search(r"\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)", line) for line in shortest)
    return [found[1] for found in opcodes if found]


def report(architecture: int) -> dict[str, Any]:
    from triton.backends.compiler import GPUTarget

    rows = {}
    for name, (kernel, constants, warps) in variants().items():
        compiled = compile_one(kernel, constants, warps, GPUTarget("cuda", architecture, 32))
        ptx = compiled.asm["ptx"]
        numbers, sass = assemble(ptx)
        rows[name] = {
            **numbers,
            "threads": 32 * warps,
            "shared": compiled.metadata.shared,
            "local": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
            "wide_loads": len(re.findall(r"ld\.global[\w.:]*evict_first[\w.:]*\.(?:v2\.b64|v4\.b32)", ptx)),
        }
        if kernel == "fingerprint_kernel":
            loop = wide_loop(sass)
            loads = sum(opcode.startswith("LDG") and ".EF" in opcode and "128" in opcode for opcode in loop)
            rows[name]["loop"] = {
                "instructions": len(loop),
                "bytes": 16 * loads,
                "barriers": sum(opcode.startswith("BAR") for opcode in loop),
                "opcodes": dict(Counter(opcode.split(".")[0] for opcode in loop).most_common()),
            }
    return rows


def report_hip() -> dict[str, Any]:
    from triton.backends.compiler import GPUTarget

    kernel, constants, warps = variants()["fingerprint, 128 words"]
    code = compile_one(kernel, constants, warps, GPUTarget("hip", "gfx942", 64)).asm["amdgcn"]
    return {
        "wide_loads": len(re.findall(r"(?:global|buffer)_load_dwordx4", code)),
        "spilled": sum(int(count) for count in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", code)),
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", code)[1]),
    }


def in_a_process_of_its_own(what: str, cache: Path) -> dict[str, Any]:
    """Other tests run the kernels under the interpreter, which a process chooses once."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, __file__, what]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda architecture: f"sm_{architecture}")
def compiled(request, tmp_path_factory):
    return in_a_process_of_its_own(str(request.param), tmp_path_factory.mktemp("triton"))


def test_nothing_spills_and_registers_stay_within_bounds(compiled):
    """Issue 3: no kernel touches local memory, on any architecture, and none needs more registers than stated."""
    assert len(compiled) >= 20
    for name, row in compiled.items():
        assert (row["spilled"], row["stack"], row["local"]) == (0, 0, 0), name
        bound = next(bound for kind, bound in reversed(REGISTERS.items()) if name.startswith(kind))
        assert row["registers"] <= bound, (name, row["registers"])
        assert row["registers"] * row["threads"] <= REGISTER_FILE, name


def test_the_fingerprint_loop_reads_16_bytes_a_load_and_has_no_barrier(compiled):
    """Issue 3: data is read 128 bits at a time in the loop that the sweep lives in, warps are free to drift, and the
    instructions a byte stay within what docs state."""
    for name, row in compiled.items():
        if not name.startswith("fingerprint"):
            continue
        assert row["wide_loads"] > 0, name
        assert row["loop"]["bytes"] >= 32, name
        assert row["loop"]["barriers"] == 0, name
        assert row["loop"]["instructions"] / row["loop"]["bytes"] <= (5.0 if "finite" in name else 3.5), (name, row)


def test_stamp_sources_are_read_16_bytes_a_load(compiled):
    """Issue 3: an aligned source is hashed from 128-bit loads."""
    assert compiled["stamps, real_kv True"]["wide_loads"] > 0


def test_the_fingerprint_kernel_compiles_for_amd(tmp_path):
    """Issue 3: gfx942 gets 128-bit loads and no spills either."""
    row = in_a_process_of_its_own("gfx942", tmp_path)
    assert row["wide_loads"] > 0
    assert row["spilled"] == 0
    assert row["registers"] <= 128


if __name__ == "__main__":
    target = sys.argv[1]
    print(json.dumps(report_hip() if target == "gfx942" else report(int(target)), indent=1))
