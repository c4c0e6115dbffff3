"""A process in which Triton kernels run on the CPU: it reads one call per line from stdin and answers on stdout.

TRITON_INTERPRET must be set before triton is first imported, and a test process may have imported it already; hence a
process of its own, one for the whole test run. A call is JSON [module, function, arguments]; the function is called
with device "cpu" first; the answer is JSON: null, or the traceback.
"""

import importlib
import json
import sys
import traceback


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a kernel prints must not mix with answers
    for line in sys.stdin:
        module, function, arguments = json.loads(line)
        try:
            getattr(importlib.import_module(module), function)("cpu", *arguments)
            answer = None
        except BaseException:
            answer = traceback.format_exc()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
