"""What people would use instead, on the same chip in the same run."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from mtp_jax.bench.suite.setting import Findings, Row, Setting

_PEER = Path(__file__).with_name("peer_transformers.py")


def peers(setting: Setting, findings: Findings) -> dict[str, Any]:
    """Hugging Face transformers on the dense model, eager and compiled; ours against it where that ran before."""
    task = {
        "config": dict(setting.dense.config),
        "batch_sizes": list(setting.batch_sizes),
        "context": setting.dense.context,
        "tokens": 8 if setting.is_tiny else 64,
        "device": "cpu" if jax.default_backend() == "cpu" else "cuda",
        "ways": ["eager"] if setting.is_tiny else ["eager", "graphs"],
    }
    found = list(run_peer(task, setting.peer_python, setting.peer_timeout_s))
    for line in found:
        if "batch_size" in line:
            findings.rows.append(_row(line, findings))
    return {"task": task, "found": found}


def _row(line: dict[str, Any], findings: Findings) -> Row:
    what, batch_size = f"transformers, {line['way']}", line["batch_size"]
    if "tokens_per_s" not in line:
        return Row(what, batch_size, note=line["error"])
    ours = {"plain": findings.plain_tokens_per_s, "best": findings.best_tokens_per_s}
    ratios = [
        f"{name} {found[batch_size] / line['tokens_per_s']:.1f}x of it"
        for name, found in ours.items()
        if batch_size in found
    ]
    return Row(what, batch_size, line["ms_per_step"], tokens_per_s=line["tokens_per_s"], note=", ".join(ratios))


def run_peer(task: dict[str, Any], python: str | None, timeout_s: float) -> Iterator[dict[str, Any]]:
    """The lines that the peer's process wrote within the time; the last says why it ended early, if it did."""
    command: Sequence[str] = (python or sys.executable, str(_PEER))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            out, _ = process.communicate(json.dumps(task), timeout=timeout_s)
            end = None if process.returncode == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            end = f"not done after {timeout_s:.0f} s"
    yield from (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    if end is not None:
        yield {"way": "ended", "error": end}
