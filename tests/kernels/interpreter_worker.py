"""A process in which Triton kernels run on the CPU: it reads one call per line from stdin and answers on stdout.

TRITON_INTERPRET must be set before triton is first imported, and a test process may have imported it already; hence a
process of its own, one for the whole test run. A call is JSON [module, function, arguments]; the function is called
with device "cpu" first; the answer is JSON: null, or the traceback.
"""

import functools
import importlib
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any


def replace_language_once() -> None:
    """Makes Triton's interpreter replace the functions of its language once for a kernel.

    It does so at every call of a function of the kernel, which takes a third of the time and changes nothing.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, set[Any]()

    @functools.cache
    def languages(function: Callable[..., Any]) -> frozenset[Any]:
        return frozenset(
            each for each in (tl, tl.core) if any(value is each for value in function.__globals__.values())
        )

    def replace_once(function: Callable[..., Any]) -> Any:
        if languages(function) <= replaced:
            return interpreter._LangPatchScope()
        scope, is_kernel = replace(function), not replaced
        replaced.update(languages(function))
        if is_kernel:  # it restores all when it has run
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    interpreter._patch_lang = replace_once


def main() -> None:
    replace_language_once()
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
