"""What may carry rows between hosts: our link over TCP, a plain TCP stream, UCX over TCP and MPI's one-sided calls.

    python3 -m venv /tmp/contestants && /tmp/contestants/bin/pip install libucx-cu12 mpich
    python -m benchmarks.hosts_contestants --contestants /tmp/contestants [--rounds 9]

Two network namespaces joined by cables (needs root and a C compiler). Data and a flag behind them go to the other host,
which waits for the flag and answers alike; both ends poll, each on a core of its own, without Python. Every round runs
all contestants. A run counts by its median; of the rounds the best counts where others use the machine, too.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.conditions import conditions, save
from tests.launcher.hosts import Host, can_make_hosts, make_hosts

SOURCE = Path(__file__).parent / "contestants" / "hosts_ping.c"
ROW_BYTES = 2 * 7168
SIZES = {"flag, 8 bytes": (8, 1000), "row of 7,168 bf16": (ROW_BYTES, 1000), "128 such rows": (128 * ROW_BYTES, 60)}
STREAM = "UCX active messages, one for each row"
PORT = 5997
_LARGE = "UCX_RNDV_THRESH=inf UCX_TCP_TX_SEG_SIZE=64k UCX_TCP_RX_SEG_SIZE=64k"
_LAUNCH = """#!/bin/sh
# As mpiexec calls ssh: options, a host, a command.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" sh -c "$*"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", type=Path, required=True, help="an environment with libucx-cu12 and mpich")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    if not can_make_hosts():
        sys.exit("two hosts are network namespaces: this needs root and ip netns")
    facts = conditions()
    times: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, make_hosts(2) as hosts:
        runs = Contestants(hosts, Path(folder), args.contestants)
        for _ in range(args.rounds):
            for what, (size, count) in SIZES.items():
                for name, run in runs.by_name.items():
                    if size > ROW_BYTES or name != STREAM:
                        times.setdefault((what, name), []).append(run(size, count))
    notes = (
        "Round trips between two network namespaces of one machine; of a run the median counts, best and middle are of "
        f"{args.rounds} rounds. One active message for each row: twice UCX's test of throughput, without answers. UCX "
        "with large segments: UCX_RNDV_THRESH=inf, UCX_TCP_TX_SEG_SIZE and _RX_ of 64k. "
        f"{', '.join(runs.versions)}. {args.note}"
    )
    print(save("hosts_contestants", "What may carry rows between hosts", rows_of(times), facts, notes, per_cpu=True))


def rows_of(times: Mapping[tuple[str, str], Sequence[float]]) -> list[dict[str, str]]:
    """Returns the rows of the table. times: µs of each round, by what was sent and how"""
    rows = []
    for (what, name), found in times.items():
        ours = times[what, "our link"]
        rows.append(
            {
                "what": what,
                "by": name,
                "best, µs": f"{min(found):.1f}",
                "middle, µs": f"{statistics.median(found):.1f}",
                "speed by best, our link = 1": f"{min(ours) / min(found):.2f}",
                "by middle": f"{statistics.median(ours) / statistics.median(found):.2f}",
            }
        )
    return rows


class Contestants:
    """Runs each of them. by_name: returns the median round trip in µs, from bytes and round trips"""

    def __init__(self, hosts: Sequence[Host], folder: Path, environment: Path):
        self._hosts, self._folder, self._environment = hosts, folder, environment
        self._ucx = next(environment.glob("lib/python3*/site-packages/libucx"))
        self.versions = sorted(
            path.name.removesuffix(".dist-info").replace("-", " ")
            for name in ("libucx", "mpich")
            for path in environment.glob(f"lib/python3*/site-packages/{name}*.dist-info")
        )
        self._port = PORT
        build = ["-O3", "-march=native", str(SOURCE), "-lpthread", "-o"]
        subprocess.run(["cc", *build, str(folder / "ping")], check=True)
        subprocess.run([str(environment / "bin" / "mpicc"), "-DMPI", *build, str(folder / "ping_mpi")], check=True)
        launch = folder / "launch"
        launch.write_text(_LAUNCH)
        launch.chmod(0o700)
        self.by_name = {
            "plain TCP stream": lambda size, count: self._ping("plain", size, count),
            "our link": lambda size, count: self._ping("link", size, count),
            "UCX put": lambda size, count: self._ucx_test("ucp_put_lat", size, count),
            "UCX active message": lambda size, count: self._ucx_test("ucp_am_lat", size, count),
            "UCX active message, large segments": lambda size, count: self._ucx_test("ucp_am_lat", size, count, _LARGE),
            STREAM: self._ucx_stream,
            "MPI put over libfabric": lambda size, count: self._mpi(
                "MPICH_CH4_NETMOD=ofi FI_PROVIDER=tcp", size, count
            ),
            "MPI put over UCX": lambda size, count: self._mpi("MPICH_CH4_NETMOD=ucx UCX_TLS=tcp", size, count),
        }

    def _run(self, server: str, client: str) -> str:
        """Returns what the client says."""
        commands = [
            ["ip", "netns", "exec", host.name, "taskset", "-c", str(core), *shlex.split(words)]
            for core, (host, words) in enumerate(zip(self._hosts, (server, client), strict=True))
        ]
        with subprocess.Popen(commands[0], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as served:
            try:
                for _ in range(50):
                    said = subprocess.run(commands[1], capture_output=True, text=True, check=False, timeout=120)
                    if said.returncode == 0:
                        return said.stdout
                raise RuntimeError(f"{client}: {said.stderr[-1000:]}")
            finally:
                served.terminate()

    def _ping(self, how: str, size: int, count: int) -> float:
        self._port += 1
        words = f"{self._hosts[0].address} {self._port} {size} {count}"
        return _median_us(self._run(f"{self._folder}/ping {how} s {words}", f"{self._folder}/ping {how} c {words}"))

    def _ucx_test(self, test: str, size: int, count: int, extra: str = "", column: int = -7) -> float:
        """Returns twice the time that UCX's own test finds for one way: by default the median."""
        self._port += 1
        settings = f"env UCX_TLS=tcp UCX_NET_DEVICES=eth0 {extra} LD_LIBRARY_PATH={self._ucx}/lib"
        settings += f" {self._ucx}/bin/ucx_perftest"
        test = f"-t {test} -s {size} -n {count} -w {max(count // 10, 5)} -f"
        said = self._run(f"{settings} -p {self._port}", f"{settings} {self._hosts[0].address} -p {self._port} {test}")
        return 2 * float(said.split()[column])

    def _ucx_stream(self, size: int, count: int) -> float:
        """Returns twice the time of these rows in UCX's own test of throughput, which has no answers."""
        rows = size // ROW_BYTES
        return rows * self._ucx_test("ucp_am_bw", ROW_BYTES, rows * count, column=-5)

    def _mpi(self, settings: str, size: int, count: int) -> float:
        names = [host.name for host in self._hosts]
        start = (
            f"env {settings} {self._environment}/bin/mpiexec -localhost {self._hosts[0].address} -iface eth0 "
            f"-launcher ssh -launcher-exec {self._folder}/launch -hosts {names[0]}:1,{names[1]}:1 -n 2 "
            f"taskset -c {','.join(map(str, sorted(os.sched_getaffinity(0))))} {self._folder}/ping_mpi {size} {count}"
        )
        command = ["ip", "netns", "exec", names[0], *shlex.split(start)]
        return _median_us(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def _median_us(said: str) -> float:
    return statistics.median(map(int, said.split())) / 1e3


if __name__ == "__main__":
    main()
