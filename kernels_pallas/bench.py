"""Paged attention on an NVIDIA Hopper GPU: is it right, and how near is it to the card's limits.

    python -m kernels_pallas.bench [--only SUBSTRING] [--checks] [--times] [--peer] [--budget SECONDS]

The card's own rates are measured first, with nothing else running. Every case runs in a process of its own, so a
failure or a hang costs that case only; programs are compiled side by side, the GPU is used by one process at a time.
Times are the kernels' own by the profiler, in programs that call them many times on input sets that rotate past the L2
cache. Prints a table; the last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict

from kernels_pallas import bench_linear
from kernels_pallas.bench_cases import CEILINGS, CHECKS, PEERS, TIMES, Case
from kernels_pallas.bench_linear import LINEAR, LinearCase


def main(argv: list[str] | None = None) -> int:
    """Runs the cases that the arguments name; 0 if none failed."""
    parser = argparse.ArgumentParser(prog="kernels_pallas.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="run cases whose name holds one of these")
    parser.add_argument("--checks", action="store_true", help="correctness only")
    parser.add_argument("--times", action="store_true", help="times only")
    parser.add_argument("--peer", action="store_true", help="FlashInfer on the same shapes, too")
    parser.add_argument("--budget", type=float, default=235.0, help="seconds after which what still runs is stopped")
    parser.add_argument("--jobs", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case is not None:
        print(json.dumps(run_case(json.loads(args.case), args.lock)), flush=True)
        return 0
    cases = selected(args.only, checks=not args.times, times=not args.checks, peers=args.peer, products=True)
    results = run_beside_ceilings(cases, args.jobs, args.budget)
    print_tables(results)
    print(json.dumps(results))
    return 0 if all("error" not in result for result in each(results)) else 1


def each(results: list[dict]) -> list[dict]:
    """The results, those of a case that has several one by one."""
    return [part for result in results for part in result.get("results", [result])]


def run_case(fields: dict, lock: str) -> dict:
    """A case's result, in this process."""
    if fields["kind"] == "linear":
        return bench_linear.run_case(LinearCase.of(fields), lock)
    from kernels_pallas import bench_run  # needs Mosaic GPU

    return bench_run.run_case(Case.of(fields), lock)


def selected(
    only: list[str], *, checks: bool, times: bool, peers: bool = False, products: bool = False
) -> list[Case | LinearCase]:
    """Attention's checks, its timed cases or both; of them those whose name holds one of `only`, or all if it is empty.

    `peers`: its peers' times too; `products`: those of products with weights.
    """
    timed = [*TIMES, *(LINEAR if products else ()), *(PEERS if peers else ())] if times else []
    cases = [*(CHECKS if checks else ()), *timed]
    return [case for case in cases if not only or any(part in case.name for part in only)]


def run_beside_ceilings(cases: Sequence[Case | LinearCase], num_jobs: int, budget_s: float) -> list[dict]:
    """`run_all`, and the card's own rates before it if anything is timed."""
    started = time.monotonic()
    ceilings = run_all([CEILINGS], 1, budget_s) if any(case.kind != "check" for case in cases) else []
    # Those whose compiler tries kernels hold the GPU long: they come last.
    last = [case for case in cases if _is_tried(case)]
    first = [case for case in cases if not _is_tried(case)]
    results = ceilings + run_all(first, num_jobs, budget_s - (time.monotonic() - started))
    return results + run_all(last, min(2, num_jobs), budget_s - (time.monotonic() - started))


def run_all(cases: Sequence[Case | LinearCase], num_jobs: int, budget_s: float) -> list[dict]:
    """One process a case, `num_jobs` at a time; each result, or why there is none, in the order of the cases."""
    deadline = time.monotonic() + budget_s
    results: dict[str, dict] = {}
    waiting, running = list(cases), {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < num_jobs:
                case = waiting.pop(0)
                running[case.name] = _start(case, folder)
            for name, (process, log) in list(running.items()):
                if process.poll() is None and time.monotonic() < deadline:
                    continue
                if process.poll() is None:
                    process.kill()
                process.wait()
                results[name] = _result(name, process.returncode, log)
                print(f"[{budget_s - (deadline - time.monotonic()):6.1f}s] {_short(results[name])}", flush=True)
                del running[name]
            if time.monotonic() > deadline:
                results.update({case.name: {"name": case.name, "error": "not started in time"} for case in waiting})
                waiting = []
            time.sleep(0.1)
    return [results[case.name] for case in cases]


def _is_tried(case: Case | LinearCase) -> bool:
    return isinstance(case, LinearCase) and case.is_tried_on_gpu


def _start(case: Case | LinearCase, folder: str):
    log = os.path.join(folder, case.name.replace("/", "_").replace(" ", "_"))
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    if case.kind == "peer":
        environment["JAX_PLATFORMS"] = "cpu"  # the card is PyTorch's in that process
    elif case.kind != "ceilings" and not _is_tried(case):  # whose products must be the best there are
        # Autotuning would use the GPU while another case is timed on it.
        environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    command = [
        sys.executable,
        "-m",
        "kernels_pallas.bench",
        "--case",
        json.dumps(asdict(case)),
        "--lock",
        os.path.join(folder, "gpu"),
    ]
    with open(log, "w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment), log


def _result(name: str, code: int, log: str) -> dict:
    with open(log) as file:
        lines = file.read().strip().splitlines()
    if code == 0 and lines and lines[-1].startswith("{"):
        return json.loads(lines[-1])
    reason = {-14: "hung on the GPU", -9: "stopped at the time limit"}.get(code, f"exit code {code}")
    return {"name": name, "error": f"{reason}: {' | '.join(lines[-3:])[-500:]}"}


def _short(result: dict) -> str:
    if "results" in result:
        return "\n  ".join([result["name"], *(_short(part) for part in result["results"])])
    return "  ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in result.items()
    )


def print_tables(results: list[dict]) -> None:
    """The table a person reads: checks, then times against the ceilings of the same run."""
    ceilings = next((result for result in results if result["name"] == "ceilings"), {})
    copy, product = ceilings.get("copy_TBps"), ceilings.get("matmul_TFLOPs")
    print(f"\nceilings: copy {copy} TB/s, bf16 product {product} TFLOP/s")
    print(f"{'case':46} {'us':>8} {'TB/s':>6} {'of copy':>8} {'TFLOP/s':>8} {'max err':>9} kernels (us)")
    for result in each(results):
        if "error" in result:
            print(f"{result['name']:46} FAILED {result['error'][:160]}")
        elif "us" in result:
            ratio = f"{result['TBps'] / copy:8.2f}" if copy else "       ?"
            print(
                f"{result['name']:46} {result['us']:8.1f} {result['TBps']:6.2f} {ratio} {result['TFLOPs']:8.0f}"
                f" {result['max_error']:9.2e} {result.get('kernels')}"
            )
        elif "num_cases" in result:
            print(
                f"{result['name']:46} right in {result['num_right']}/{result['num_cases']} cases,"
                f" worst |error| {result['max_error']:.2e}, worst cosine distance {result['max_cosine']:.1e}"
            )


if __name__ == "__main__":
    sys.exit(main())
