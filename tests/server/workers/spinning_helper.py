"""A helper whose job "spin" computes for ever: `python -m tests.server.workers.spinning_helper PARENT_PID NICENESS`."""

from moe_serve.server.workers.helper_process import serve_jobs


def answer(job: bytes) -> bytes:
    while job == b"spin":
        pass
    return job


if __name__ == "__main__":
    serve_jobs(answer, 1 << 30)
