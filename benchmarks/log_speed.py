"""Time and memory of reading logs: sparse (steps between noise) and dense (one step a line of 5 KB).

``--full`` takes a log of 1 GB of each kind; ``--write`` renews ``log_speed.md`` from it.
"""

import argparse
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
QUICK_MB, FULL_MB = (8, 16, 32), (128, 256, 512, 1024)
HEAD = """# Reading logs: time and memory

`python benchmarks/log_speed.py --full --write` makes this page. Each size is read by a process of its own;
RSS is that process's peak; seconds include the load of other jobs on the machine, CPU seconds do not.
*sparse*: one verl step line of about 1 KB in 200 lines of engine and server
noise. *dense*: every line is a verl step line of about 5 KB with 110 keys. *json*: JSON objects, one in 200
with metrics. The slope is that of log CPU time over log size (1 = linear).

"""


def _step_line(step: int, rng: random.Random, num_extra: int) -> bytes:
    gen, update = 100 + rng.random() * 50, 80 + rng.random() * 20
    parts = [
        f"step:{step}",
        *(f"actor/extra_metric_number_{index}/mean:{rng.random()}" for index in range(num_extra)),
        f"response_length/mean:{800 + rng.random()}",
        f"prompt_length/mean:{100 + rng.random()}",
        f"timing_s/gen:{gen}",
        f"timing_s/update_actor:{update}",
        f"timing_s/old_log_prob:{rng.random() * 20}",
        f"timing_s/step:{gen + update + 21}",
        f"perf/total_num_tokens:{rng.randrange(1 << 20)}",
        f"perf/throughput:{500 + rng.random()}",
    ]
    return ("(TaskRunner pid=4242) " + " - ".join(parts) + "\n").encode()


def _noise(rng: random.Random) -> bytes:
    replica = rng.randrange(16)
    return (
        f"(vLLMHttpServer pid={5000 + replica}) INFO {rng.randrange(10**6)} [async_llm.py:260] Added request "
        f"{rng.getrandbits(64):016x} to replica {replica}: 'POST /v1/completions HTTP/1.1' 200 OK\n"
    ).encode()


def _lines(kind: str, start: int, rng: random.Random) -> list[bytes]:
    if kind == "dense":
        return [_step_line(start + index, rng, 100) for index in range(40)]
    if kind == "json":
        return [
            b'{"time": 1234.5, "level": "info", "message": "request served", "tokens": %d}\n'
            % rng.randrange(999)
            for _ in range(199)
        ] + [b'{"_step": %d, "timing_s/gen": %.3f, "timing_s/step": %.3f}\n' % (start, 100.0, 200.0)]
    return [_noise(rng) for _ in range(200)] + [_step_line(start, rng, 8)]


def write_log(path: Path, kind: str, num_mb: int) -> None:
    """Write a log of about ``num_mb`` MB whose steps count up."""
    rng, size, step = random.Random(1), 0, 1
    with path.open("wb") as file:
        while size < num_mb << 20:
            lines = _lines(kind, step, rng)
            step += len(lines) if kind == "dense" else 1
            size += file.write(b"".join(lines))


def measure(path: Path) -> tuple[float, float, float, int]:
    """Return seconds, CPU seconds, peak RSS in MB and steps of reading a log in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--read", str(path)], capture_output=True, text=True, check=True
    )
    seconds, cpu_s, megabytes, steps = done.stdout.split()
    return float(seconds), float(cpu_s), float(megabytes), int(steps)


def read(path: Path) -> None:
    """Read one log and print seconds, CPU seconds, peak RSS in MB and the number of steps."""
    from bidirl.traces.logs import read_logs

    start, cpu_start = time.perf_counter(), time.process_time()
    steps = sum(map(len, read_logs([path])))
    seconds = time.perf_counter() - start
    cpu_s = time.process_time() - cpu_start
    print(seconds, cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, steps)


def main() -> None:
    """Measure, print, and renew the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="up to 1 GB of each kind")
    parser.add_argument("--write", action="store_true", help="renew the page")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read(arguments.read)
        return
    rows = ["| log | MB | steps | seconds | CPU s | MB per CPU s | RSS MB | slope |", "|---" * 8 + "|"]
    for kind in ("sparse", "dense", "json"):
        before: tuple[int, float] | None = None
        for num_mb in FULL_MB if arguments.full else QUICK_MB:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "run.log"
                write_log(path, kind, num_mb)
                seconds, cpu_s, megabytes, steps = measure(path)
            slope = ""
            if before is not None:
                slope = f"{math.log(cpu_s / before[1]) / math.log(num_mb / before[0]):.2f}"
            before = (num_mb, cpu_s)
            rows.append(
                f"| {kind} | {num_mb} | {steps:,} | {seconds:.1f} | {cpu_s:.1f} | {num_mb / cpu_s:.0f} "
                f"| {megabytes:.0f} | {slope} |"
            )
            print(rows[-1], flush=True)
    if arguments.write:
        PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
